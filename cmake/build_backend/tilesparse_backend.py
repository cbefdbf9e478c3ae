"""Build backend: scikit-build-core, with nvcc from the package index where the system has none.

The CUDA kernels are built where TILESPARSE_CUDA=ON asks for them, and by default on machines that have an
NVIDIA driver or a CUDA compiler. Source distributions get the CUTLASS headers, so that they are built without
a network.
"""

from __future__ import annotations

import ctypes.util
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scikit_build_core import build as _skb
from scikit_build_core.build import (
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

# The first release of each CUDA whose requirements name one version of every part of the compiler.
_TOOLKITS = {(13, 0): "13.0.3.0", (13, 2): "13.2.2"}
_CUTLASS = Path(__file__).resolve().parents[2] / "third_party" / "cutlass"
# The headers and the licence in the wheel of nvidia-cutlass.
_HEADERS = re.compile(r"cutlass_library/source/(include/(?:cute|cutlass)/.+)")
_LICENCE = re.compile(r"[^/]+\.dist-info/licenses/(LICENSE\.txt)")
_CUDA_OPTION = re.compile(r"TILESPARSE_CUDA(?::BOOL)?=(\w+)")
_OFF = {"OFF", "0", "NO", "FALSE", "N"}


def _cuda_option(settings: Settings) -> bool | None:
    """Return what TILESPARSE_CUDA is set to, or None if it is not set."""
    variables = ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")
    lines = [os.environ.get(name, "") for name in variables]
    lines += [f"{key}={value}" for key, value in (settings or {}).items()]
    values = _CUDA_OPTION.findall("\n".join(lines))
    return values[-1].upper() not in _OFF if values else None


def _machine_has_cuda() -> bool:
    """Return True if there is a CUDA compiler, of any release, or an NVIDIA driver."""
    if os.environ.get("CUDACXX") or shutil.which("nvcc", path=_nvcc_path()):
        return True
    return ctypes.util.find_library("cuda") is not None or shutil.which("nvidia-smi") is not None


def _wants_cuda(settings: Settings) -> bool:
    option = _cuda_option(settings)
    return _machine_has_cuda() if option is None else option


def _nvcc_path() -> str:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return os.pathsep.join([os.environ.get("PATH", "")] + [f"{root}/bin" for root in roots if root])


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
    nvcc = shutil.which("nvcc", path=_nvcc_path())
    return nvcc is not None and _is_recent(nvcc)


def _requires(settings: Settings) -> list[str]:
    if not _wants_cuda(settings):
        return []
    download = ["pip"]  # fetches the CUTLASS headers
    if _system_has_nvcc():
        return download
    version = _TOOLKITS[max(_oldest_nvcc(), min(_TOOLKITS))]
    return [*download, f"cuda-toolkit[nvcc,cudart,cccl]=={version}"]


def _configure_cuda(settings: Settings) -> None:
    """Turn CUDA off where this machine has none, or point CMake to the nvcc of the package index."""
    if not _wants_cuda(settings):
        if _cuda_option(settings) is None:
            print("tilesparse: no NVIDIA driver and no nvcc here, so kernels for the CPU alone are built;")
            print("tilesparse: TILESPARSE_CUDA=ON, see docs/install.md, builds those for GPUs as well")
            os.environ["CMAKE_ARGS"] = f"{os.environ.get('CMAKE_ARGS', '')} -DTILESPARSE_CUDA=OFF".strip()
        return
    if _system_has_nvcc():
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
    _configure_cuda(config_settings)
    return _skb.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _configure_cuda(config_settings)
    return _skb.build_editable(wheel_directory, config_settings, metadata_directory)


@contextmanager
def _bundled_cutlass() -> Iterator[None]:
    """Meanwhile third_party/cutlass has the pinned headers and their licence."""
    headers, licence = _CUTLASS / "include", _CUTLASS / "LICENSE.txt"
    if headers.exists():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        pinned = ["--require-hashes", "--requirement", str(_CUTLASS / "requirements.txt")]
        subprocess.run([*command, *pinned, "--dest", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if match := _HEADERS.fullmatch(name) or _LICENCE.fullmatch(name):
                        target = _CUTLASS / match[1]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))
            yield
        finally:
            shutil.rmtree(headers, ignore_errors=True)
            licence.unlink(missing_ok=True)


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return [*_skb.get_requires_for_build_sdist(config_settings), "pip"]


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    with _bundled_cutlass():
        return _skb.build_sdist(sdist_directory, config_settings)
