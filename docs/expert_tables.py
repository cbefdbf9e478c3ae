"""The tables of experts: grouped products, and what pruning costs; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from table_parts import RESULTS, cases, document, short, stored, table

OPS = {"forward": "forward", "dx": "gradient of x", "dw": "gradient of W"}
FILES = {"H100": "h100_experts.json#products", "H200": "h200_experts.json#products"}


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


def of_devices(run: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the devices on which a run of bench_experts.py was measured, with its cases."""
    for device in ("H100", "H200"):
        file = f"{device.lower()}_experts.json"
        if (RESULTS / file).exists() and run in stored.documents(RESULTS / file):
            yield device, document(f"{file}#{run}")["cases"]


def grouped_eight_bits() -> str:
    """Each product of factors in 8 bits beside PyTorch's of dense float8; and a whole one beside bfloat16."""
    header = [
        *("", "experts", "rows", "block", "density", "routing", "dense float8", "float8", "int8"),
        *("dense bfloat16", "bfloat16", "float8 with quantizing x"),
    ]
    lines: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for device, found in of_devices("eight_bits"):
        for case in found:
            size = device, f"{case['experts']} × {case['out_features']}×{case['in_features']}"
            what = str(case["rows"]), str(case["block_shape"][0]), short(case["density"]), case["routing"]
            lines.setdefault((*size, *what), {})[case["dtype"]] = case["results"][0]
    return table(header, ([*what, *_eight_bits(both)] for what, both in lines.items()))


def _eight_bits(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    one = found["float8"]
    yield f"{one['grouped_us']:.0f}"
    for name in ("float8", "int8"):
        yield f"{found[name]['t_us']:.0f}, {found[name]['speedup']:.2f}×"
    yield f"{one['grouped_bf16_us']:.0f}"
    for name in ("sparse_bf16_us", "whole_us"):
        yield f"{one[name]:.0f}, {one['grouped_bf16_us'] / one[name]:.2f}×"


def grouped_products_cpu() -> str:
    """The same on a CPU, beside a loop over dense experts."""
    header = ["experts", "block", "density", "dtype", "threads", "a loop, forward", *OPS.values()]
    lines = []
    for file, threads in (("cpu_experts.json#one_thread", "1"), ("cpu_experts.json#two_threads", "2")):
        for case in sorted(cases(file), key=lambda case: case["dtype"]):
            size = f"{case['experts']} × {case['out_features']}×{case['in_features']}, top {case['top_k']}"
            found = {result["op"]: result for result in case["results"]}
            loop = f"{found['forward']['loop_us'] / 1e3:.0f}"
            cells = [f"{found[op]['t_us'] / 1e3:.0f}, {found[op]['speedup']:.1f}×" for op in OPS]
            block, density = str(case["block_shape"][0]), short(case["density"])
            lines.append([size, block, density, case["dtype"], threads, loop, *cells])
    return table(header, lines)


def experts_layer() -> str:
    """A whole Qwen3-MoE layer beside Transformers' grouped implementation."""
    header = ["", "tokens", "dtype", "block", "density", "dense, forward", "forward", "dense, step", "step"]
    lines = []
    found = [
        (device, case)
        for run in ("layer", "layer_eight_bits")
        for device, own in of_devices(run)
        for case in own
    ]
    for device, case in found:
        ops = {result["op"].removeprefix("layer "): result for result in case["results"]}
        cells = ["-"] * 4  # no step in 8 bits
        for i, op in enumerate(("forward", "step")):
            if op in ops:
                dense, ours = ops[op]["grouped_us"], ops[op]["t_us"]
                cells[2 * i : 2 * i + 2] = f"{dense:.0f}", f"{ours:.0f}, {ops[op]['speedup']:.2f}×"
        block, density = str(case["block_shape"][0]), short(case["density"])
        lines.append([device, str(case["tokens"]), case["dtype"], block, density, *cells])
    return table(header, lines)


EXPERT_TABLES: dict[str, Callable[[], str]] = {
    "grouped_products": grouped_products,
    "grouped_eight_bits": grouped_eight_bits,
    "grouped_products_cpu": grouped_products_cpu,
    "experts_layer": experts_layer,
}
