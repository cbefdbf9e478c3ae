"""The interface of built programs: the binary interface, its versions, headers without warnings."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from abi import facts
from test_packaging import HEADER, LIBRARY, ROOT, run

BASELINE = (ROOT / "tests/c/abi.txt").read_text().splitlines()
LAYER = HEADER.with_suffix(".hpp")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]


def test_the_interface_is_that_of_its_baseline() -> None:
    now = facts(HEADER)
    lost = [line for line in BASELINE if line not in now]
    assert lost == [], "programs that are built would break: restore these lines, or raise TS_ABI_VERSION"
    added = [line for line in now if line not in BASELINE]
    assert added == [], "python tests/python/abi.py > tests/c/abi.txt writes these lines down"
    assert now == BASELINE


def test_every_header_of_the_layer_has_the_version_of_the_header() -> None:
    version = re.search(r'TS_VERSION "(\d+)\.(\d+)', HEADER.read_text())
    assert version is not None
    for header in LAYER.parent.glob("*.hpp"):
        namespaces = re.findall(r"inline namespace (\w+) \{", header.read_text())
        assert namespaces == ([] if header == LAYER else [f"v{version[1]}_{version[2]}"]), header


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_the_layer_compiles_without_warnings(standard: str) -> None:
    run(
        "g++",
        f"-std={standard}",
        "-fsyntax-only",
        *WARNINGS,
        "-I",
        HEADER.parents[1],
        ROOT / "tests/cpp/test_hpp.cpp",
    )


@pytest.mark.parametrize(("abi", "advice"), [(0, "install a newer library"), (2, "install an older library")])
def test_a_library_of_another_abi_is_refused_with_a_sentence(abi: int, advice: str, tmp_path: Path) -> None:
    """A program is linked to this library and finds another one when it starts."""
    program = tmp_path / "program.cpp"
    program.write_text(
        "#include <cstdio>\n#include <tilesparse/tilesparse.hpp>\n"
        "int main() try { tilesparse::Pattern::from_mask({1}, {16, 16}, {16, 16}); }\n"
        "catch (const tilesparse::VersionError& error) { std::puts(error.what()); return 3; }\n"
    )
    other = tmp_path / "other.c"
    other.write_text(
        f'int ts_abi_version(void) {{ return {abi}; }}\nconst char* ts_version(void) {{ return "9.8.7"; }}\n'
    )
    (tmp_path / "lib").mkdir()
    # As old programs are: functions are looked up when they are called.
    flags = ["-std=c++17", "-I", HEADER.parents[1], "-L", LIBRARY.parent, "-ltilesparse", "-Wl,-z,lazy"]
    run("g++", program, *flags, "-o", tmp_path / "program")
    soname = re.search(r"SONAME.*\[(.+)\]", run("readelf", "-d", LIBRARY))
    assert soname is not None
    run("cc", "-shared", "-fPIC", other, "-o", tmp_path / "lib" / soname[1])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "lib")}
    result = subprocess.run(
        [tmp_path / "program"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 3, result.stderr
    assert f"the library that is loaded is 9.8.7, ABI {abi}" in result.stdout and advice in result.stdout


def test_the_page_about_the_layer_compiles(tmp_path: Path) -> None:
    """Its first program runs; the others are compiled with declarations of what they name."""
    page = (ROOT / "docs/cpp-api.md").read_text()
    program, memory, on_gpu, choice = re.findall(r"^```cpp\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "program.cpp").write_text(program)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", HEADER.parents[1], "-I", tmp_path]
    link = ["-L", LIBRARY.parent, "-ltilesparse", f"-Wl,-rpath,{LIBRARY.parent}"]
    run("g++", tmp_path / "program.cpp", *flags, *link, "-o", tmp_path / "program")
    run(tmp_path / "program")

    (tmp_path / "cuda_runtime_api.h").write_text(
        "#include <cstddef>\nstruct CUstream_st;\nenum cudaMemcpyKind { cudaMemcpyDefault };\n"
        "int cudaMalloc(void**, std::size_t);\nint cudaFree(void*);\n"
        "int cudaStreamSynchronize(CUstream_st*);\n"
        "int cudaMemcpy(void*, const void*, std::size_t, cudaMemcpyKind);\n"
    )
    (tmp_path / "others.cpp").write_text(
        f"#include <cstdio>\n#include <vector>\nvoid check_cuda(int);\n{memory}"
        "void run(const tilesparse::Pattern& pattern, int tokens, ts_stream_t stream) {\n"
        f"std::vector<float> x, values, y;\n{on_gpu}{choice}}}\n"
    )
    run("g++", tmp_path / "others.cpp", *flags, "-fsyntax-only")
