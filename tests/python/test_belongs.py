"""Errors where parts of an installation, or the driver, do not belong together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilesparse
from tilesparse import _C

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(tilesparse.__file__).parent
NATIVE = Path(_C.__file__).parent
LIBRARY = NATIVE / "lib" / "libtilesparse.so"
HEADER = NATIVE / "include" / "tilesparse" / "tilesparse.h"


# An editable installation puts itself before all folders of sys.path.
NOT_EDITABLE = (
    "import sys; sys.meta_path = [one for one in sys.meta_path if 'Redirecting' not in type(one).__name__]\n"
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = NOT_EDITABLE + code if "PYTHONPATH" in environment else code
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def shared_object(folder: Path, name: str, source: str) -> Path:
    """A library made of a few lines of C."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "source.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / name


def copy_of_the_package(folder: Path) -> Path:
    """All of it beside each other, wherever the native part is installed."""
    copy = folder / "tilesparse"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "_C*.so", "lib"))
    shutil.copy(_C.__file__, copy)
    shutil.copytree(NATIVE / "lib", copy / "lib")
    beside = NATIVE.parent / "tilesparse.libs"  # of a repaired wheel
    if beside.is_dir():
        shutil.copytree(beside, folder / beside.name)
    return copy


def test_the_python_files_state_the_version_of_the_header() -> None:
    stated = re.search(r'#define TS_VERSION "([^"]+)"', HEADER.read_text())
    assert stated is not None and stated[1] == tilesparse.__version__ == _C.version()


def test_a_library_of_another_version_is_refused_at_import(tmp_path: Path) -> None:
    """As of a program that has loaded its own."""
    declared = {*re.findall(r"TS_API [^;(]*?(ts_\w+)\(", HEADER.read_text())} - {
        "ts_version",
        "ts_abi_version",
    }
    rest = "".join(f"int {name}(void) {{ return 8; }}\n" for name in declared)
    for version, abi in (("0.0.9", 1), ("99.0.0", 2)):
        identity = f'const char* ts_version(void) {{ return "{version}"; }}\n'
        identity += f"int ts_abi_version(void) {{ return {abi}; }}\n"
        other = shared_object(tmp_path / version, "libtilesparse.so", identity + rest)
        done = run("import tilesparse", LD_PRELOAD=str(other))
        assert done.returncode == 1
        assert f"ImportError: the library {other} is tilesparse {version} (ABI {abi})" in done.stderr
        assert f"this Python package is {_C.version()} (ABI {_C.abi_version()})" in done.stderr
        assert "install the package again, and see that neither LD_LIBRARY_PATH nor" in done.stderr


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("", ".*ts_"),  # another library comes before the package's own
        ("_C*.so", "cannot import name '_C'"),
        ("lib/libtilesparse.so", r"libtilesparse\.so.*No such file"),
    ],
)
def test_a_native_module_that_cannot_be_loaded_is_explained(tmp_path: Path, lost: str, reason: str) -> None:
    if lost:
        (found,) = copy_of_the_package(tmp_path).glob(lost)
        found.unlink()
        done = run("import tilesparse", PYTHONPATH=str(tmp_path))
    else:
        other = shared_object(tmp_path, "libtilesparse.so", "int nothing;")
        done = run("import tilesparse", LD_PRELOAD=str(other))
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(rf"^ImportError: tilesparse: the native module in .* cannot be loaded: .*{reason}", last)
    assert ("install the package again: pip install" if lost else "see LD_LIBRARY_PATH") in last


def test_python_files_of_another_version_are_refused_at_import(tmp_path: Path) -> None:
    copy = copy_of_the_package(tmp_path)
    file = copy / "__init__.py"
    file.write_text(file.read_text().replace(f'"{_C.version()}"', '"0.9.0"'))
    done = run("import tilesparse", PYTHONPATH=str(tmp_path))
    text = f"ImportError: tilesparse: the Python files in {copy} are version 0.9.0, and the native module"
    assert f"{text} {copy}/_C" in done.stderr
    assert "install the package again: pip install" in done.stderr


# ---- the driver ----

needs_cuda = pytest.mark.skipif("sm_" not in _C.architectures(), reason="this library has no CUDA kernels")
ASK = f"""
import ctypes
library = ctypes.CDLL({str(LIBRARY)!r})
library.ts_last_error.restype = ctypes.c_char_p
info = (ctypes.c_uint32 * 22)(88)  # ts_device_info
print(library.ts_device_get(1, 0, info), library.ts_last_error().decode())
"""

# Functions that the CUDA runtime asks a driver for first; all others are missing.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = %d; return 0; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* status) {
    *found = 0;
    if (strcmp(name, "cuInit") == 0) *found = (void*)cuInit;
    if (strcmp(name, "cuDriverGetVersion") == 0) *found = (void*)cuDriverGetVersion;
    if (strcmp(name, "cuGetProcAddress") == 0) *found = (void*)cuGetProcAddress_v2;
    if (status) *status = *found == 0;
    return *found ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""


@needs_cuda
@pytest.mark.parametrize("version", [12020, 11080])
def test_a_driver_that_is_too_old_is_named(tmp_path: Path, version: int) -> None:
    shared_object(tmp_path, "libcuda.so.1", DRIVER % version)
    done = run(ASK, LD_LIBRARY_PATH=str(tmp_path))
    number = f"{version // 1000}.{version % 1000 // 10}"
    assert done.stdout.startswith("4 no usable CUDA device: "), done
    assert f"; the NVIDIA driver is for CUDA {number} and this library was built with CUDA 1" in done.stdout
    assert "; install a driver for CUDA 1" in done.stdout


@needs_cuda
def test_a_missing_driver_is_missed(tmp_path: Path) -> None:
    """The file of its name is no library here, as far as the loader is concerned."""
    (tmp_path / "libcuda.so.1").write_text("nothing")
    done = run(ASK, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout.startswith("4 no usable CUDA device: "), done
    assert "; there is no NVIDIA driver (libcuda.so.1); install one, in a container give it" in done.stdout
