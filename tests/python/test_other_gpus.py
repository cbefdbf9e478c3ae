"""GPUs that are not here: what is chosen and refused for them, and every kernel as they would run it.

`TILESPARSE_DEVICE_LIMITS` lowers what the library takes a device to have. With it kernels take the shared
memory, stages and grids that they take on a smaller GPU, and the checks of test_kernels.py hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_kernels import CODES, CUDA, FAST, GROUPED_ROWS, ROWS, Row, accepts, entry_of, form_of

from tilesparse import _C, BlockPattern, tuning
from tilesparse._checks import BLOCK_SIZES
from tilesparse.errors import UnsupportedError
from tilesparse.tuning import Device, Product
from tilesparse.tuning.product import OPS, runs_on

NO_ROOM = ("the device has too little shared memory", "the device has no room for clusters of thread blocks")
# By the GPU that each stands for. Kernels are launched with the properties that these leave.
LIMITS = {
    "A100": {"compute_capability": 80, "multiprocessors": 108, "shared_memory": 163 << 10},
    "A40": {"compute_capability": 86, "multiprocessors": 84, "shared_memory": 99 << 10},
    "AGX Orin": {"compute_capability": 87, "multiprocessors": 16, "shared_memory": 163 << 10},
    "L40S": {"compute_capability": 89, "multiprocessors": 142, "shared_memory": 99 << 10},
    "RTX 4070": {"compute_capability": 89, "multiprocessors": 46, "shared_memory": 99 << 10},
    "slice of an H100": {"multiprocessors": 16, "max_cluster": 1},
    "larger slice of an H100": {"multiprocessors": 46},
}
HOPPER = Device.find("H100")
ASK = """
import tilesparse
try:
    device = tilesparse.tuning.Device.find("cuda")
    print(device.name, device.multiprocessors, device.shared_memory)
except tilesparse.errors.InvalidArgumentError as error:
    print(error)
"""
TESTS = "test_small or test_more_tiles or (test_each_group and uneven)"
SECONDS = 900

needs_all = pytest.mark.skipif(
    not {"sm_80", "sm_90"} <= set(_C.architectures().split(",")),
    reason="this library was built for some architectures alone",
)


def limited(limits: dict[str, int], device: Device = HOPPER) -> _C.DeviceInfo:
    """Describe a GPU with such limits, which lower what it has."""
    info = device.info()
    kept = {
        name: min(limits.get(name, getattr(info, name)), getattr(info, name))
        for name in ("compute_capability", "multiprocessors", "shared_memory")
    }
    return _C.DeviceInfo(
        CUDA, **kept, name="limited", max_cluster=limits.get("max_cluster", info.max_cluster)
    )


def kernels_of(rows: list[Row], device: _C.DeviceInfo) -> set[str]:
    """Names of the kernels that a GPU has room for, with blocks of some shape."""
    able = [row for row in rows if runs_on(_C.kernels()[row.number - 1], CUDA, device.compute_capability)]
    shapes = list(product(BLOCK_SIZES, BLOCK_SIZES))
    return {row.name for row in able if any(accepts(row, shape, device=device) for shape in shapes)}


def refusal(row: Row, device: _C.DeviceInfo) -> str:
    """Why a GPU has no room for a kernel, as a call is told before anything is launched."""
    entry = entry_of(row, torch.device("cpu"), BlockPattern.full((128, 128), block_shape=128), 1)
    options = {"precision": row.precision, "kernel": row.number, **form_of(row, 8)}
    asked = _C.Product(entry.descriptor, row.op, CODES[row.dtype], CUDA, 8, **options)
    with pytest.raises(UnsupportedError) as caught:
        asked.select(device)
    return str(caught.value)


@needs_all
def test_kernels_of_fast_sums_compute_no_others() -> None:
    """One has these alone. Another has a second kernel for them, whose results are row-major."""
    device, block = limited({}), (128, 128)
    of_name = {row.name.removeprefix("sm90_dds_nt_float8_"): row for row in ROWS}
    alone, beside = of_name["fast_bf16_pingpong_384x128"], of_name["bf16_pingpong_256x128"]
    assert accepts(alone, block, device=device) and alone.precision == FAST
    assert not accepts(alone._replace(precision=0), block, device=device)
    usual, fast = beside._replace(precision=0), beside._replace(precision=FAST)
    assert accepts(usual, block, y_layout=1, device=device) and accepts(fast, block, device=device)
    assert not accepts(fast, block, y_layout=1, device=device)


@needs_all
@pytest.mark.parametrize("name", LIMITS)
def test_what_has_no_room_is_refused_and_another_kernel_computes_it(name: str) -> None:
    device = limited(LIMITS[name])
    rows = [row for row in ROWS if not row.of_any_block]  # they refuse what others take, and have room
    able = kernels_of(rows, device)
    for row in rows:
        if runs_on(_C.kernels()[row.number - 1], CUDA, device.compute_capability) and row.name not in able:
            assert any(reason in refusal(row, device) for reason in NO_ROOM), row
    for op, block, tokens, dtype in product(
        OPS, (16, 32, 64, 128), (1, 64, 8192), (torch.bfloat16, torch.float32, torch.float64)
    ):
        choice = tuning.choose(Product(4096, 14336, tokens, 0.25, block, dtype, op), Device.of(device))
        assert choice.kernel in able | {None}  # None: dense is faster
        assert choice.candidates, "no kernel is left"


def launch_all(limits: dict[str, int], report: Path) -> subprocess.CompletedProcess[str]:
    """Run the checks of all kernels in a process that sees a smaller GPU."""
    text = ",".join(f"{name}={most}" for name, most in limits.items())
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", TESTS, f"--junitxml={report}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "test_kernels.py"],
        cwd=Path(__file__).parent,
        env=os.environ | {"TILESPARSE_DEVICE_LIMITS": text},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIMITS)
def test_kernels_compute_what_they_should_on_a_smaller_gpu(name: str, tmp_path: Path) -> None:
    """Nothing hangs, results are right, and no kernel that has room there was left out."""
    done = launch_all(LIMITS[name], tmp_path / "report.xml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = {
        found.get("value")
        for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")
        for found in case.iter("property")
        if case.find("skipped") is None
    }
    device = limited(LIMITS[name], Device.find("cuda"))
    assert passed == kernels_of([*ROWS, *GROUPED_ROWS], device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("threads=3", "may limit compute_capability, multiprocessors, shared_memory and max_cluster"),
        ("multiprocessors", "NAME=POSITIVE_INTEGER"),
        ("multiprocessors=-1", "NAME=POSITIVE_INTEGER"),
        ("multiprocessors=16x", "NAME=POSITIVE_INTEGER"),
        ("multiprocessors=0", "NAME=POSITIVE_INTEGER"),
    ],
)
def test_limits_that_say_nothing_are_refused(limits: str, message: str) -> None:
    assert message in device_with(limits)


@pytest.mark.gpu
def test_limits_lower_what_a_device_has_and_never_raise_it() -> None:
    here = Device.find("cuda")
    seen = device_with("multiprocessors=16,shared_memory=1000000000")
    assert seen == f"{here.name} (limited) 16 {here.shared_memory}"
    assert device_with("") == f"{here.name} {here.multiprocessors} {here.shared_memory}"


def device_with(limits: str) -> str:
    """Return how a process with these limits describes the GPU, or the error it raises."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"TILESPARSE_DEVICE_LIMITS": limits},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
