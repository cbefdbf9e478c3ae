"""Build backend: scikit-build-core, with nvcc from the package index where the system has none."""

from __future__ import annotations

import importlib
import os
import platform
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

# Of each release of CUDA the first whose requirements name one version of every part of the compiler.
_TOOLKITS = {(13, 0): "13.0.3.0", (13, 2): "13.2.2"}
_CUDA_OFF = re.compile(r"TILESPARSE_CUDA(:BOOL)?=(OFF|0|NO|FALSE)\b", re.IGNORECASE)


def _wants_cuda(settings: Settings) -> bool:
    given = [f"{key}={value}" for key, value in (settings or {}).items()]
    given += [
        os.environ.get(name, "") for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")
    ]
    return not _CUDA_OFF.search("\n".join(given))


def _oldest_nvcc() -> tuple[int, int]:
    """The first release that has what the build needs and headers that agree with those of the C library."""
    name, version = platform.libc_ver()
    libc = tuple(int(part) for part in version.split(".")) if name == "glibc" else ()
    return (13, 2) if libc >= (2, 42) else (13, 0) if libc >= (2, 41) else (12, 4)


def _is_recent(nvcc: str) -> bool:
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    return release is not None and (int(release[1]), int(release[2])) >= _oldest_nvcc()


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
    if _system_has_nvcc():
        return download
    version = _TOOLKITS[max(_oldest_nvcc(), min(_TOOLKITS))]
    return [*download, f"cuda-toolkit[nvcc,cudart,cccl]=={version}"]


def _provide_nvcc(settings: Settings) -> None:
    """Points CMake to the nvcc of the package index if that is the one to use."""
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
