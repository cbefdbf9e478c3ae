"""The tables of grouped products of experts; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from table_parts import cases, short, table

OPS = {"forward": "forward", "dx": "gradient of x", "dw": "gradient of W"}
FILES = {"H100": "h100_experts.json"}


def grouped_products() -> str:
    """Each product beside the faster of the two dense ways, even routing and Zipf's."""
    header = ["", "experts", "tokens", "block", "density", "routing", "dense, forward", *OPS.values()]
    lines = [[device, *line] for device, file in FILES.items() for line in _lines(file)]
    return table(header, lines)


def _lines(file: str) -> Iterator[list[str]]:
    for case in cases(file):
        size = f"{case['experts']} × {case['out_features']}×{case['in_features']}, top {case['top_k']}"
        found = {result["op"]: result for result in case["results"]}
        what = str(case["block_shape"][0]), short(case["density"]), case["routing"]
        forward = found["forward"]
        dense = f"{_dense(forward):.0f} ({'grouped' if _is_grouped(forward) else 'a loop'})"
        cells = [f"{found[op]['t_us']:.0f}, {_dense(found[op]) / found[op]['t_us']:.2f}×" for op in OPS]
        yield [size, str(case["tokens"]), *what, dense, *cells]


def _is_grouped(result: dict[str, Any]) -> bool:
    return bool(result["grouped_us"] <= result["loop_us"])


def _dense(result: dict[str, Any]) -> float:
    return float(min(result["grouped_us"], result["loop_us"]))


EXPERT_TABLES: dict[str, Callable[[], str]] = {"grouped_products": grouped_products}
