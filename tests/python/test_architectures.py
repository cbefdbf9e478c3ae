"""A tile is one row, and an architecture one folder and its line in cmake/Architectures.cmake.

A copy of the sources gets one more architecture, whose kernels have no GPU code, and is built for it alone,
without the kernels of every architecture and of the CPU, which no choice of a kernel calls.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_packaging import ROOT, SOONEST, copy_for_any_processor, run

from tilesparse import _C
from tilesparse.tuning import Device
from tilesparse.tuning.product import GPUS as KNOWN_GPUS

CUDA_FOLDERS = [
    os.path.join(home, "bin") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home
]
NVCC = shutil.which("nvcc", path=os.pathsep.join([os.environ["PATH"], *CUDA_FOLDERS]))
TEGRA = ("AGX Orin",)
# All that the build looks at before it compiles.
CUTLASS = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
ASK = """
import importlib.util, json, os, sys
sys.setdlopenflags(os.RTLD_LAZY)
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

def select(policy):
    pattern = _C.Pattern(64, 64, 1024, 1024, 64, 0, 0, 0)
    product = _C.Product(pattern, 0, 3, 1, 50, policy=policy)
    index, reason = product.select(_C.DeviceInfo(1, 86, 84, 101376))
    return ["dense" if index < 0 else _C.kernels()[index].name, reason]

kernels = [kernel.name for kernel in _C.kernels() if kernel.device == 1]
print(json.dumps([_C.architectures(), kernels, select(0), select(1)]))
"""

TILES = """
// TS_TILE(name, stub, tokens of a tile)
TS_TILE(sm86_stub_64, stub, 64)
"""
STUB = """
#pragma once
#include "common/problem.h"

namespace ts::sm86 {
template <int kTileTokens>
struct Stub {
    static const char* refuses(const Problem&, const Device&) { return nullptr; }
    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }
    static int32_t launch(const Problem&, const Device&, const Decision&, void*, void*) { return 0; }
    static constexpr Kernel row(const char* name) {
        Kernel row{name, DeviceType::cuda, 86, 1u << static_cast<int>(Op::dds_nt),
                   1u << static_cast<int>(DType::float16), Precision::highest, {0, 0}, kTileTokens, 128, 0,
                   refuses, workspace_size, launch};
        row.family = "sm86_stub";
        row.united_features = 128;
        return row;
    }
};
}  // namespace ts::sm86

#define TS_ROW_stub(name, tile_tokens)                                  \\
    namespace ts::sm86 {                                                \\
    const Kernel& name() {                                              \\
        static constexpr Kernel kRow = Stub<tile_tokens>::row(#name);   \\
        return kRow;                                                    \\
    }                                                                   \\
    }
"""
# In place of portable.cpp, and the other units that are left out.
NO_STEPS = """
#include "cpu/steps.h"

namespace ts::cpu {
const InstructionSet portable{};
const InstructionSet& widest() { return portable; }
}  // namespace ts::cpu
"""


def copy_sources(target: Path) -> None:
    """Copy the files that CMake reads, and add an architecture."""
    copy_for_any_processor(target)
    for file in (*target.glob("cuda/*/*.cu"), *target.glob("cpp/src/cpu/*_portable.cpp")):
        file.write_text("")
    (target / "cpp/src/cpu/portable.cpp").write_text(NO_STEPS)
    folder = target / "cuda" / "sm86"
    folder.mkdir()
    for name, text in {"tiles.def": TILES, "stub.cuh": STUB}.items():
        (folder / name).write_text(text)
    listed = target / "cmake" / "Architectures.cmake"
    listed.write_text(listed.read_text().replace("    80\n", "    80\n    86\n"))
    headers = target / "cutlass" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "version.h").write_text(CUTLASS)


def build(sources: Path) -> None:
    folder = sources / "build"
    options: dict[str, Any] = {
        "TILESPARSE_ARCHITECTURES": 86,
        "CUTLASS_DIR": sources / "cutlass",
        "CMAKE_CUDA_COMPILER": NVCC,
        **SOONEST,
        "CMAKE_CUDA_FLAGS_DEBUG": "-Xcicc -O0 -Xptxas -O0",
        "CMAKE_SHARED_LINKER_FLAGS": "-Wl,-z,lazy",
        "TILESPARSE_STATIC": "OFF",
    }
    definitions = (f"-D{name}={value}" for name, value in options.items())
    run("cmake", "-G", "Ninja", "-S", sources, "-B", folder, *definitions)
    run("cmake", "--build", folder)


def ask(sources: Path) -> list[Any]:
    """Load the new library in a process and return its architectures, kernels and choices."""
    folder = sources / "module"
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    module = shutil.copy(_C.__file__, folder)
    shutil.copy(sources / "build" / "libtilesparse.so", folder / "lib")
    answer: list[Any] = json.loads(run(sys.executable, "-c", ASK, module))
    return answer


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_an_architecture_is_a_folder_and_a_tile_is_a_row(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    build(tmp_path)
    architectures, kernels, chosen, automatic = ask(tmp_path)
    assert (architectures, kernels) == ("cpu,sm_86", ["sm86_stub_64"])
    times = re.search(r"the least estimated time on this device; estimated (.*) us, dense (.*) us", chosen[1])
    assert chosen[0] == "sm86_stub_64" and times is not None
    faster = float(times[2]) < float(times[1])  # of dense, by what the GPU is capable of
    assert automatic[0] == ("dense" if faster else "sm86_stub_64")

    tiles = tmp_path / "cuda" / "sm86" / "tiles.def"
    tiles.write_text(TILES + "TS_TILE(sm86_stub_32, stub, 32)\n")
    build(tmp_path)
    architectures, kernels, chosen, automatic = ask(tmp_path)
    assert (architectures, kernels) == ("cpu,sm_86", ["sm86_stub_64", "sm86_stub_32"])
    assert chosen[0] in kernels


def test_releases_have_native_code_for_every_gpu_that_has_a_name() -> None:
    """Code for a compute capability runs on later ones of the same major number, that with "a" there alone.

    On the boards of Tegra nothing but their own does: they take PTX.
    """
    listed = (ROOT / "cmake" / "Architectures.cmake").read_text()
    own = re.findall(r"^    (\d+)(a?)$", listed, re.MULTILINE)
    native = re.findall(r"set\(known_native ([\d ]+)\)", listed)[0].split()
    assert (
        'CMAKE_ARGS = "-DTILESPARSE_CUDA=ON -DTILESPARSE_NATIVE=all"' in (ROOT / "pyproject.toml").read_text()
    )
    float8 = re.findall(r"set\(float8_code 80 (\d+)\)", listed)
    assert float8 == ["89"]
    checked = ",".join(sorted({*native, *float8, *(number for number, _ in own)}, key=int))
    for path in ("tools/release.sh", ".github/workflows/release.yml"):
        assert re.search(rf"gpus[= ]{checked}\b", (ROOT / path).read_text()), path
    codes = [(int(number), False) for number in native] + [(int(number), bool(a)) for number, a in own]
    for name in KNOWN_GPUS:
        major, minor = Device.find(name).compute_capability or (0, 0)
        if major < 8 or name in TEGRA:
            continue
        capability = 10 * major + minor
        assert any(
            code == capability if alone else code // 10 == major and code <= capability
            for code, alone in codes
        ), name
