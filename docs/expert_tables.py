"""The tables of experts: grouped products, and what pruning costs; ``docs/tables.py`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from table_parts import cases, short, table

OPS = {"forward": "forward", "dx": "gradient of x", "dw": "gradient of W"}
FILES = {"H100": "h100_experts.json#products"}
PRUNED, SPLIT = "h100_prune_experts.json", "cpu_split_ffn.json"
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
    header = ["", "tokens", "block", "density", "dense, forward", "forward", "dense, step", "step"]
    lines = []
    for case in cases("h100_experts.json#layer"):
        found = {result["op"].removeprefix("layer "): result for result in case["results"]}
        cells = [
            cell
            for op in ("forward", "step")
            for cell in (
                f"{found[op]['grouped_us']:.0f}",
                f"{found[op]['t_us']:.0f}, {found[op]['speedup']:.2f}×",
            )
        ]
        lines.append(
            ["H100", str(case["tokens"]), str(case["block_shape"][0]), short(case["density"]), *cells]
        )
    return table(header, lines)


def experts_parts() -> str:
    """The steps of the sparse layer, and their share of the layer."""
    (case,) = cases("h100_experts.json#parts")
    found = {result["part"]: result["t_us"] for result in case["results"]}
    names = ("router", "sort", "gather", "gate and up", "activation", "down", "combine")
    lines = [
        [
            name,
            f"{found[name]:.0f}",
            f"{found[name] / found['all']:.0%}",
            f"{found[f'gradient of {name}']:.0f}" if f"gradient of {name}" in found else "-",
        ]
        for name in names
    ]
    return table(["", "µs", "of the forward pass", "its gradients, µs"], lines)


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


EXPERT_TABLES: dict[str, Callable[[], str]] = {
    "grouped_products": grouped_products,
    "grouped_products_cpu": grouped_products_cpu,
    "experts_layer": experts_layer,
    "experts_parts": experts_parts,
    "pruned_experts": pruned_experts,
    "pruned_expert_times": pruned_expert_times,
    "split_layers": split_layers,
}
