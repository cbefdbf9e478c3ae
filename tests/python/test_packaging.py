"""The installed package: versions, the shared library, and a C and a C++ consumer built against it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tilesparse
from tilesparse import _C

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(_C.__file__).parent
LIBRARY = PACKAGE / "lib" / "libtilesparse.so"
HEADER = PACKAGE / "include" / "tilesparse" / "tilesparse.h"
SYMBOLS = (ROOT / "tests" / "c" / "symbols.txt").read_text().split()


# The settings that compile soonest.
SOONEST = {
    "CMAKE_BUILD_TYPE": "Debug",
    "CMAKE_CXX_FLAGS_DEBUG": "-O0",
    "CMAKE_UNITY_BUILD": "ON",
    "CMAKE_UNITY_BUILD_BATCH_SIZE": 0,
}


def copy_for_any_processor(target: Path) -> None:
    """Copy what CMake reads, without the kernels of x86, which take most of the time to compile."""
    for name in ("CMakeLists.txt", "LICENSE", "cmake", "cpp", "cuda", "third_party"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / name)
    for file in (target / "cpp/src/cpu").iterdir():
        file.write_text(file.read_text().replace("#ifdef __x86_64__", "#if 0"))


# Says how many threads the process has before and after a product, and which OpenMP runtimes it has loaded.
COUNT_THREADS = """
import json, os, torch, tilesparse

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
x = torch.randn(256, 256)
(x @ x).exp()
before = threads()
with torch.no_grad():
    tilesparse.BlockSparseLinear(256, 256, density=0.5)(x)
maps = open("/proc/self/maps").read().split()
runtimes = {word for word in maps if os.path.basename(word).startswith(("libgomp", "libomp", "libiomp"))}
print(json.dumps([before, threads(), sorted(runtimes)]))
"""
# A library that hides the system's OpenMP runtime, as where it is not installed.
HIDE_OPENMP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void* dlopen(const char* name, int flags) {
    if (name != NULL && strcmp(name, "libgomp.so.1") == 0) {
        fputs("hidden", stderr);
        return NULL;
    }
    return ((void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen"))(name, flags);
}
"""


def run(*command: object, expected_error: str = "", **environment: str) -> str:
    """The standard output of a command; the test fails with all its output where it fails."""
    parts = [str(part) for part in command]
    result = subprocess.run(parts, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert expected_error in result.stderr
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_versions_agree() -> None:
    stated = re.search(r'#define TS_VERSION "([^"]+)"', HEADER.read_text())
    assert stated is not None
    assert stated[1] == _C.version() == importlib.metadata.version("tilesparse") == tilesparse.__version__
    config = PACKAGE / "lib/cmake/tilesparse/tilesparseConfigVersion.cmake"
    assert f'set(PACKAGE_VERSION "{stated[1]}")' in config.read_text()


def test_library_exports_the_abi_alone() -> None:
    lines = run("nm", "-D", "--defined-only", LIBRARY).splitlines()
    exported = sorted(line.split()[-1].split("@")[0] for line in lines)
    assert exported == SYMBOLS


def test_header_declares_what_is_exported() -> None:
    declared = re.findall(r"TS_API [^;(]*?(ts_\w+)\(", HEADER.read_text())
    assert sorted(declared) == SYMBOLS


def test_library_loads_without_cuda_python_or_pytorch() -> None:
    needed = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", LIBRARY))
    foreign = [name for name in needed if re.match(r"lib(cuda|cudart|python|torch|c10)\b", name)]
    assert foreign == []


def test_library_is_small() -> None:
    assert LIBRARY.stat().st_size < 13.1e6


def test_one_pool_of_threads_with_pytorch() -> None:
    before, after, runtimes = json.loads(run(sys.executable, "-c", COUNT_THREADS))
    assert after <= before
    assert len(runtimes) == 1, runtimes


def test_an_import_is_silent_and_its_dependencies_are_stated() -> None:
    code = "import sys, tilesparse, tilesparse.prune, tilesparse.tuning.advise; sys.stderr.write('imported')"
    command = sys.executable, "-W", "always", "-c", code
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == "imported"
    lines = [line for line in importlib.metadata.requires("tilesparse") or [] if "extra ==" not in line]
    required = {re.split(r"[ <>=!;\[]", line)[0] for line in lines}
    assert required == {"torch", "safetensors", "numpy", "platformdirs", "tqdm"}


def test_licences_and_bill_of_materials_are_installed() -> None:
    files = importlib.metadata.files("tilesparse") or []
    texts = {file.name: file.read_text() for file in files if file.parent.name in ("licenses", "third_party")}
    assert "Redistribution and use" in texts["LICENSE"]
    assert {"CUTLASS", "nanobind", "robin-map"} <= set(
        re.findall(r"^([\w-]+) \(", texts["NOTICE.txt"], re.MULTILINE)
    )
    (bill,) = (json.loads(file.read_text()) for file in files if file.name == "tilesparse.cdx.json")
    assert bill["metadata"]["component"]["version"] == tilesparse.__version__
    assert {"nanobind", "robin-map"} <= {component["name"] for component in bill["components"]}


def test_consumers_in_c_and_cpp(tmp_path: Path) -> None:
    """A project that uses find_package(tilesparse); tests/c covers every public function, and
    fuzz_abi.cpp calls all that is exported."""
    run("cmake", "-G", "Ninja", "-S", ROOT / "tests/c", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={PACKAGE}")
    run("cmake", "--build", tmp_path)
    for program in ("test_abi", "test_threads", "test_memory", "test_copies", "test_hpp", "fuzz_abi"):
        run(tmp_path / program)
    undefined = run("nm", "-u", tmp_path / "fuzz_abi").split()
    assert sorted({name.split("@")[0] for name in undefined if name.startswith("ts_")}) == SYMBOLS


def test_library_computes_without_an_openmp_runtime(tmp_path: Path) -> None:
    """Slim containers have none, and there a C program has no PyTorch that brings one."""
    (tmp_path / "hide.c").write_text(HIDE_OPENMP)
    run("cc", "-shared", "-fPIC", tmp_path / "hide.c", "-o", tmp_path / "hide.so", "-ldl")
    source = ROOT / "tests" / "cpp" / "test_threads.cpp"
    paths = [f"-I{PACKAGE / 'include'}", f"-L{LIBRARY.parent}", f"-Wl,-rpath,{LIBRARY.parent}"]
    run("c++", "-std=c++17", source, *paths, "-ltilesparse", "-pthread", "-o", tmp_path / "threads")
    run(tmp_path / "threads")
    run(tmp_path / "threads", expected_error="hidden", LD_PRELOAD=str(tmp_path / "hide.so"))


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_of_a_moved_installation(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for part in ("include", "lib"):
        shutil.copytree(PACKAGE / part, moved / part)
    search = f"PKG_CONFIG_PATH={moved / 'lib' / 'pkgconfig'}"
    flags = run("env", search, "pkg-config", "--cflags", "--libs", "tilesparse").split()
    program = tmp_path / "program.c"
    program.write_text(
        "#include <tilesparse/tilesparse.h>\nint main(void) { return ts_abi_version() != TS_ABI_VERSION; }\n"
    )
    assert str(PACKAGE) not in " ".join(flags)
    run("cc", program, *flags, f"-Wl,-rpath,{moved / 'lib'}", "-o", tmp_path / "program")
    run(tmp_path / "program")


def test_description_has_no_links_to_files_of_the_repository() -> None:
    """They lead nowhere on a package index."""
    description = importlib.metadata.metadata("tilesparse").get_payload()
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", description) == []
    assert description.startswith("# TileSparse")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build backend, without the scikit-build-core that it hands on to, on a machine without CUDA."""
    stub: Any = ModuleType("scikit_build_core.build")
    stub.prepare_metadata_for_build_editable = stub.prepare_metadata_for_build_wheel = None
    package: Any = ModuleType("scikit_build_core")
    package.build = stub
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", stub)
    for name in [
        "CMAKE_ARGS",
        "SKBUILD_CMAKE_ARGS",
        "SKBUILD_CMAKE_DEFINE",
        "CUDACXX",
        "CUDA_HOME",
        "CUDA_PATH",
    ]:
        monkeypatch.delenv(name, raising=False)
    path = ROOT / "cmake" / "build_backend" / "tilesparse_backend.py"
    spec = importlib.util.spec_from_file_location("tilesparse_backend", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: None)
    return module


def test_machines_without_cuda_build_for_the_cpu_and_say_so(
    backend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backend._requires(None) == []  # neither nvcc nor CUTLASS
    monkeypatch.setenv("CMAKE_ARGS", "-DOTHER=1")
    backend._configure_cuda(None)
    assert os.environ["CMAKE_ARGS"] == "-DOTHER=1 -DTILESPARSE_CUDA=OFF"
    assert "TILESPARSE_CUDA=ON" in capsys.readouterr().out


def test_a_driver_a_compiler_or_a_setting_asks_for_cuda(
    backend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on = {"cmake.define.TILESPARSE_CUDA": "ON"}
    assert any(need.startswith("cuda-toolkit[nvcc") for need in backend._requires(on))
    monkeypatch.setenv("CMAKE_ARGS", "-DTILESPARSE_CUDA=ON -DTILESPARSE_CUDA=OFF")  # the last one counts
    assert not backend._wants_cuda(None) and backend._wants_cuda(on)
    backend._configure_cuda(None)
    assert capsys.readouterr().out == ""  # as asked for
    monkeypatch.delenv("CMAKE_ARGS")
    monkeypatch.setattr(backend.ctypes.util, "find_library", lambda name: "libcuda.so.1")
    assert any(need.startswith("cuda-toolkit[nvcc") for need in backend._requires(None))
    monkeypatch.setattr(backend.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setenv("CUDACXX", "/opt/nvcc")
    assert backend._requires(None) == ["pip"]
