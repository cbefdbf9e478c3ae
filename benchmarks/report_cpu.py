"""The table of what bench_cpu_eight_bits.py has measured, for report.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = tuple[str, list[str], list[list[str]]]  # what it shows, header, lines
Cases = Sequence[Mapping[str, Any]]


def eight_bits(cases: Cases) -> Table:
    """Speedups of int8 over the fastest dense int8 product and over the same pattern in bfloat16."""
    blocks = sorted({case["block"] for case in cases})
    layers: dict[tuple[int, int, float], list[Mapping[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: int(case["block"])):
        layers.setdefault((case["in_features"], case["out_features"], case["density"]), []).append(case)
    lines = []
    for (in_features, out_features, density), of_blocks in layers.items():
        name, time = min(of_blocks[0]["dense_us"].items(), key=lambda item: item[1])
        cells = [
            f"{case['int8_us'] / 1e3:.2f} ms, {case['speedup']:.2f}×,"
            f" {case['own_us']['bfloat16'] / case['int8_us']:.2f}×"
            for case in of_blocks
        ]
        dense = f"{time / 1e3:.2f} ms ({name})"
        lines.append([f"{in_features} → {out_features}", f"{density:g}", dense, *cells])
    what = "Time of int8, speedup over the fastest dense int8 product, and over the same blocks in bfloat16"
    return what, ["layer", "density", "dense int8", *(f"{block}x{block}" for block in blocks)], lines
