"""The tables of experts: grouped products, and what pruning costs; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from table_parts import cases, short, table

OPS = {"forward": "forward", "dx": "gradient of x", "dw": "gradient of W"}
FILES = {"H100": "h100_experts.json"}
PRUNED, SPLIT = "h100_prune_experts.json", "h100_split_ffn.json"
WAYS = {
    "dense": "dense",
    "blocks": "blocks, equally many of each expert",
    "allocated": "blocks, spent on experts by `allocate`",
    "reconstructed": "blocks, `reconstruct` first",
    "usage": "whole experts, those with fewest tokens dropped",
    "error": "whole experts, those with least error kept",
}


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


def pruned_experts() -> str:
    """Bits per byte of a mixture that loses blocks or experts, before and after recovery."""
    header = ["density", "what is kept", "block", "MB of experts", "pruned", "recovered"]
    return table(header, [_pruned(case) for case in _by_density(PRUNED)])


def _by_density(file: str) -> list[dict[str, Any]]:
    found = [case for case in cases(file) if "unavailable" not in case]
    return sorted(found, key=lambda case: (-case["density"], list(WAYS).index(case["way"]), case["block"]))


def _pruned(case: dict[str, Any]) -> list[str]:
    loss = {one["stage"]: one["bits_per_byte"] for one in case["results"] if "bits_per_byte" in one}
    size = f"{case['expert_bytes'] / 1e6:.1f}"
    block = str(case["block"]) if case["way"] not in ("dense", "usage", "error") else "-"
    stages = [f"{loss[stage]:.3f}" if stage in loss else "-" for stage in ("pruned", "recovered")]
    if case["way"] == "dense":
        stages = [f"{loss['trained']:.3f}", "-"]
    if "reconstructed" in loss:
        stages[0] += f", then {loss['reconstructed']:.3f}"
    return [short(case["density"]), WAYS[case["way"]], block, size, *stages]


def pruned_expert_times() -> str:
    """Times of the model and of one mixture, dense and with fewer blocks or experts."""
    chosen = [case for case in _by_density(PRUNED) if case["way"] in ("blocks", "usage")]
    header = ["density", "what is kept", "block", "tokens", "model, ms", "model", "mixture, µs", "mixture"]
    return table(header, [line for case in chosen for line in _timed(case)])


def _timed(case: dict[str, Any]) -> Iterator[list[str]]:
    found = [result for result in case["results"] if result["stage"] == "time"]
    block = "-" if case["way"] == "usage" else str(case["block"])
    what = "whole experts" if case["way"] == "usage" else "blocks"
    for tokens in sorted({result["tokens"] for result in found}, reverse=True):
        own = {result["what"]: result for result in found if result["tokens"] == tokens}
        model, mixture = own["model"], own["mixture"]
        cells = [f"{model['t_us'] / 1e3:.2f}", f"{model['speedup']:.2f}×"]
        cells += [f"{mixture['t_us']:.0f}", f"{mixture['speedup']:.2f}×"]
        yield [short(case["density"]), what, block, str(tokens), *cells]


def split_layers() -> str:
    """Dense feed-forward layers split into experts, beside block-sparse ones."""
    header = ["", "multiplied", "error of layers", "cosine"]
    lines = [
        [result["way"], short(case["fraction"]), f"{result['error']:.3f}", f"{result['cosine']:.3f}"]
        for case in cases(SPLIT)
        for result in case["results"]
    ]
    return table(header, lines)


def split_layer_times() -> str:
    """Times of one of these layers on a CPU."""
    header = ["", "multiplied", "tokens", "dense, µs", "µs", "speedup"]
    lines = [
        [
            result["way"],
            short(case["fraction"]),
            str(one["tokens"]),
            f"{one['dense_us']:.0f}",
            f"{one['t_us']:.0f}",
            f"{one['speedup']:.2f}×{' *' if one['unsteady'] else ''}",
        ]
        for case in cases(SPLIT)
        for result in case["results"]
        for one in result.get("times", [])
    ]
    return table(header, lines)


EXPERT_TABLES: dict[str, Callable[[], str]] = {
    "grouped_products": grouped_products,
    "pruned_experts": pruned_experts,
    "pruned_expert_times": pruned_expert_times,
    "split_layers": split_layers,
    "split_layer_times": split_layer_times,
}
