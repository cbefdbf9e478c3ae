"""Releases have code for every GPU that is known by name."""

from __future__ import annotations

import re

from test_packaging import ROOT

from tilesparse.tuning import Device
from tilesparse.tuning.product import GPUS as KNOWN_GPUS

TEGRA = ("AGX Orin",)


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
