"""Build backend: scikit-build-core, with nvcc from the package index where the system has none."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess

from scikit_build_core import build as _skb
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]] | None

# This release pins every part of the compiler to one version; older ones of 13.0 do not.
_TOOLKIT = "cuda-toolkit[nvcc,cudart,cccl]==13.0.3.0"
_OLDEST_NVCC = (12, 4)
_CUDA_OFF = re.compile(r"TILESPARSE_CUDA(:BOOL)?=(OFF|0|NO|FALSE)\b", re.IGNORECASE)


def _wants_cuda(settings: Settings) -> bool:
    given = [f"{key}={value}" for key, value in (settings or {}).items()]
    given += [
        os.environ.get(name, "") for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")
    ]
    return not _CUDA_OFF.search("\n".join(given))


def _is_recent(nvcc: str) -> bool:
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    return release is not None and (int(release[1]), int(release[2])) >= _OLDEST_NVCC


def _system_has_nvcc() -> bool:
    if os.environ.get("CUDACXX"):
        return True
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", "")] + [f"{root}/bin" for root in roots if root])
    nvcc = shutil.which("nvcc", path=path)
    return nvcc is not None and _is_recent(nvcc)


def _requires(settings: Settings) -> list[str]:
    if not _wants_cuda(settings):
        return []
    download = ["pip"]  # fetches the CUTLASS headers
    return download if _system_has_nvcc() else [*download, _TOOLKIT]


def _provide_nvcc(settings: Settings) -> None:
    """Points CMake to the nvcc of _TOOLKIT if that is the one to use."""
    if not _wants_cuda(settings) or _system_has_nvcc():
        return
    try:
        root = importlib.import_module("nvidia.cu13").__path__[0]
    except ModuleNotFoundError:
        return  # CMake then says what is missing
    os.environ["CUDACXX"] = f"{root}/bin/nvcc"
    # The wheels have lib where nvcc looks in lib64.
    os.environ["CUDAFLAGS"] = f"{os.environ.get('CUDAFLAGS', '')} -L{root}/lib".strip()


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*_skb.get_requires_for_build_wheel(config_settings), *_requires(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*_skb.get_requires_for_build_editable(config_settings), *_requires(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _provide_nvcc(config_settings)
    return _skb.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _provide_nvcc(config_settings)
    return _skb.build_editable(wheel_directory, config_settings, metadata_directory)
