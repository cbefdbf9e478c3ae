"""The tables that pages take from benchmarks/results; ``docs/tables.py`` writes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import report
from table_parts import cases, document, runs, short, table, times

BLOCKS = (16, 32, 64, 128)
DENSITIES = (0.5, 0.25, 0.1)
PRODUCTS = {"dds_nt": "forward", "dds_nn": "gradient of x", "sdd_tn": "gradient of W"}
LARGE = ("up", "down")  # layers of 4096 -> 14336 and 14336 -> 4096 features, 8192 tokens
WIDE = (4096, 4096)  # in, out of the larger layer that was measured on a CPU


def summary() -> str:
    """Forward products, by device, density and block."""
    lines = [
        [f"H200, bfloat16, density {short(density)}", *(times(_large(density, block)) for block in BLOCKS)]
        for density in DENSITIES
    ]
    for density in DENSITIES[:2]:
        cells = [times(_cpu("float32", "forward", 512, density, block)) for block in BLOCKS]
        lines.append([f"two CPU cores, float32, density {short(density)}", *cells])
    return table(["speedup over dense", *(f"{block} × {block}" for block in BLOCKS)], lines)


def tokens() -> str:
    """Forward products on an H200, by number of tokens."""
    lines = []
    for label, shapes in {
        "8192 tokens, 4096 ↔ 14336": LARGE,
        "8192 tokens, 768 → 3072": ("bert",),
        "64 tokens, 8192 → 28672": ("decode28672-m64",),
        "16 tokens, 8192 → 28672": ("decode28672-m16",),
        "1 token, 8192 → 28672": ("decode28672-m1",),
    }.items():
        for density in DENSITIES:
            cells = [times(_h200("dds_nt", shapes, density, block)) for block in BLOCKS]
            lines.append([label, short(density), *cells])
    return table(["", "density", *(f"{block} × {block}" for block in BLOCKS)], lines)


def products() -> str:
    """The products of a training step on an H200 at density .25, and the break-even density."""
    names = ("h200_bf16.json#products", "h200_bf16.json#break_even")
    break_even = report.break_even([document(name) for name in names])
    lines = []
    for label, op, name in (
        ("forward", "dds_nt", "forward"),
        ("gradient of x", "dds_nn", "dgrad"),
        ("gradient of W", "sdd_tn", "wgrad"),
    ):
        cells = [
            f"{times(_h200(op, LARGE, 0.25, block))}, {short(break_even[name][str(block)])}"
            for block in BLOCKS
        ]
        lines.append([label, *cells])
    return table(["", *(f"{block} × {block}" for block in BLOCKS)], lines)


def cpu() -> str:
    """The three products on two cores of a CPU."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for label, op, count in (
            ("forward, 512 tokens", "forward", 512),
            ("forward, 8 tokens", "forward", 8),
            ("gradient of x", "dgrad", 512),
            ("gradient of W", "wgrad", 512),
        ):
            cells = [
                " / ".join(times(_cpu(dtype, op, count, density, block)) for density in DENSITIES[:2])
                for block in BLOCKS[:3]
            ]
            lines.append([dtype, label, *cells])
    return table(["", "", *(f"{block} × {block}" for block in BLOCKS[:3])], lines)


def models() -> str:
    """Whole models on an H200 in CUDA graphs, every linear layer sparse."""
    lines = []
    for model, task in (("vit", "inference"), ("vit", "training"), ("llama-prefill", "inference")):
        for block in (64, 128):
            lines.append([f"{model}, {task}", f"{block} × {block}", *_models(model, task, block)])
    return table(["", "block", *(f"density {short(density)}" for density in DENSITIES)], lines)


def efficiency() -> str:
    """η of random patterns on an H200, at each density."""
    shapes = ("up", "down", "vith", "bert")
    lines = [
        [
            product,
            f"{block}×{block}",
            *(_efficiencies("h200_bf16.json#products", op, block, shape) for shape in shapes),
        ]
        for op, product in PRODUCTS.items()
        for block in reversed(BLOCKS)
    ]
    return table(["product", "block", *shapes], lines)


def unequal() -> str:
    """η of up on an H200 for rows or columns of unequal length, at density .25 and .1, beside Triton."""
    patterns, densities = ("power", "power-columns", "banded"), DENSITIES[1:]
    lines = []
    for op in ("dds_nt", "dds_nn"):
        for block in (128, 64, 32):
            by = partial(_efficiencies, "h200_patterns.json#unequal", op, block, "up", densities)
            cells = [f"{by(pattern)} ({by(pattern, 'triton')})" for pattern in patterns]
            lines.append([PRODUCTS[op], f"{block}×{block}", *cells])
    return table(["product", "block", *(f"{pattern} (Triton)" for pattern in patterns)], lines)


def packed() -> str:
    """128 to 512 tokens on an H200: µs at density .25 and .1 as chosen, and with a prepacked weight."""
    found: dict[tuple[str, int], dict[tuple[str, float], str]] = {}
    for case in cases("h200_packed.json"):
        row = found.setdefault((case["shape"], case["block_shape"][0]), {})
        for one in case["results"]:
            if "t_us" in one:
                row[one["contender"], case["requested_density"]] = f"{one['t_us']:.0f}"
                row["dense", 1] = f"{min(one['dense_us']):.0f}"
    lines = []
    for (shape, block), row in sorted(found.items(), key=lambda item: -item[0][1]):
        cells = [
            " / ".join(row.get((contender, density), "-") for density in DENSITIES[1:])
            for contender in ("tilesparse", "packed", "triton")
        ]
        lines.append([shape.replace("x", "×"), f"{block}×{block}", *cells, row["dense", 1]])
    header = ["tokens × out × in", "block", "as chosen", "prepacked", "Triton", "dense"]
    return table(header, lines)


def sizes() -> str:
    """Forward products of 128 to 6144 tokens on an H200, by the time of the dense product."""
    bounds = (0, 12, 24, 48, 96, math.inf)  # us
    lines = []
    for least, most in pairwise(bounds):
        for density in DENSITIES[1:]:
            cells = [_win(_fastest(density, block, least, most)) for block in BLOCKS]
            name = f"up to {most} µs" if most < math.inf else f"more than {least} µs"
            lines.append([name, short(density), *cells])
    return table(["dense takes", "density", *(f"{block} × {block}" for block in BLOCKS)], lines)


def captured() -> str:
    """Whole models on an H200 in CUDA graphs, eager and compiled."""
    names = {
        "vit": "ViT-H/14, 64 images",
        "roberta": "RoBERTa-base, 16 × 512 tokens",
        "llama-prefill": "Llama 3 8B, a decoder block, 8192 tokens",
        "llama-decode1": "the same, one token after 8192",
        "llama-decode16": "the same, 16 of these",
    }
    measured = {
        (case["model"], case["task"], case["mode"]): case for case in cases("h200_models.json#captured")
    }
    lines = []
    for model, name in names.items():
        for task in ("inference", "training"):
            if (model, task, "graph") not in measured:
                continue
            cells = [
                cell for mode in ("graph", "compile-graph") for cell in _captured(measured[model, task, mode])
            ]
            lines.append([f"{name}, {task}" if model in ("vit", "roberta") else name, *cells])
    return table(["model", "dense", "sparse", "dense, compiled", "sparse, compiled"], lines)


def quality() -> str:
    """MiniLM's sentence embeddings after one-shot pruning."""
    pruned = {case["density"]: case for case in cases("cpu_pruning.json#minilm")}
    magnitude = {case["density"]: case for case in cases("cpu_pruning.json#minilm_magnitude")}
    lines = [
        [
            short(density),
            *(f"{by[density]['mean']:.2f}" if density in by else "" for by in (pruned, magnitude)),
        ]
        for density in sorted(pruned, reverse=True)
    ]
    return table(["density", "block OBS with refit", "magnitude"], lines)


def host() -> str:
    """Host time of one call of a tiny layer."""
    modes = {
        "inference": "forward in `inference_mode`",
        "no_grad": "forward in `no_grad`",
        "forward": "forward, recorded",
        "forward+backward": "forward and backward",
    }
    lines = []
    for case in cases("h200_host.json"):
        (one,) = case["results"]
        host_times = (f"{one[of]:#.3g}".rstrip(".") + " µs" for of in ("dense_host_us", "host_us"))
        lines.append([modes[case["mode"]], *host_times, f"{one['ratio']:.2f}"])
    return table(["", "`nn.Linear`", "`BlockSparseLinear`", "ratio"], lines)


def vllm() -> str:
    """Tokens per second of vLLM on two cores of a CPU, dense and sparse."""
    measured = {(case["model"], case["measure"]): case for case in cases("cpu_vllm.json")}
    names = list(dict.fromkeys(model for model, _ in measured))
    measures = list(dict.fromkeys(measure for _, measure in measured))
    lines = []
    for name in names:
        found = [measured.get((name, measure)) for measure in measures]
        cells = [f"{one['tokens_per_second']:.0f} ({one['speedup']:.1f}×)" if one else "-" for one in found]
        lines.append([name, *cells])
    headers = (name.replace("decode ", "decode, batch ") for name in measures)
    return table(["model, density", *headers], lines)


def small_blocks_cpu() -> str:
    """Products of small blocks on a CPU, over scipy."""
    return _small_blocks("cpu_small_blocks.json", "scipy BSR", "scipy CSR")


def small_blocks_gpu() -> str:
    """The same on a GPU, over cuSPARSE."""
    return _small_blocks("h200_small_blocks.json", "cuSPARSE BSR (PyTorch)", "cuSPARSE CSR (CuPy)")


def _small_blocks(file: str, *others: str) -> str:
    counts, lines = (1, 8, 64), []
    every = [case for run in runs(file) for case in run["cases"]]
    found = {(case["block"], case["dtype"], case["columns"]): case for case in every}
    for block, dtype in sorted(dict.fromkeys(key[:2] for key in found), key=lambda pair: pair[0]):
        own = [_result(found[block, dtype, count], "tilesparse") for count in counts]
        cells = [f"{result['t_us'] / 1e3:.3g}" if result else "-" for result in own]
        for other in others:
            for count, result in zip(counts, own, strict=True):
                beside = _result(found[block, dtype, count], other)
                cells.append(times([beside["t_us"] / result["t_us"]] if beside and result else []))
        lines.append([f"{block} × {block}", dtype, *cells])
    titles = [f"{name}, {n}" for name in ("ms", *(f"over {other}" for other in others)) for n in counts]
    return table(["blocks", "", *titles], lines)


PRODUCT_TABLES = (summary, tokens, sizes, products, cpu, models, efficiency)
OTHER_TABLES = (unequal, packed, captured, quality, host, vllm, small_blocks_cpu, small_blocks_gpu)
TABLES: dict[str, Callable[[], str]] = {maker.__name__: maker for maker in (*PRODUCT_TABLES, *OTHER_TABLES)}


def _efficiencies(
    file: str,
    op: str,
    block: int,
    shape: str,
    densities: Sequence[float] = DENSITIES,
    pattern: str = "random",
    contender: str = "tilesparse",
) -> str:
    """η at each density, with a star for an unsteady dense product."""
    found = {
        case["requested_density"]: _result(case, contender)
        for case in cases(file)
        if (case["op"], case["block_shape"], case["shape"], case["pattern"])
        == (op, [block, block], shape, pattern)
    }
    return " / ".join(
        f"{one['efficiency']:.2f}".removeprefix("0") + "*" * one["unsteady"]
        if (one := found.get(density))
        else "-"
        for density in densities
    )


def _result(case: dict[str, Any], contender: str) -> dict[str, Any] | None:
    """The result of one contender, or None if it was not measured."""
    measured = (one for one in case["results"] if one["contender"] == contender and "t_us" in one)
    return next(measured, None)


def _captured(case: dict[str, Any]) -> tuple[str, str]:
    """Time and memory of the dense and of the sparse model."""
    (sparse,) = case["results"]
    dense = statistics.mean(sparse["dense_us"])
    sizes = [f"{of['peak_bytes'] / 1e9:.2f} GB" for of in (case, sparse)]
    taken = [f"{time / 1e3:#.3g}".rstrip(".") + " ms" for time in (dense, sparse["t_us"])]
    return f"{taken[0]}, {sizes[0]}", f"{taken[1]} ({sparse['speedup']:.2f}×), {sizes[1]}"


def _h200(op: str, shapes: Iterable[str], density: float, block: int) -> Iterator[float]:
    """Speedups of this library for each of the shapes."""
    for case in (*cases("h200_bf16.json#products"), *cases("h200_decode.json")):
        if (case["op"], case["requested_density"], case["block_shape"]) != (op, density, [block, block]):
            continue
        if case["shape"] in shapes:
            yield from (one["speedup"] for one in case["results"] if one["contender"] == "tilesparse")


def _fastest(density: float, block: int, least: float, most: float) -> list[float]:
    """Speedups of the fastest kernel where the dense time lies between two bounds in µs."""
    results = [
        case["results"][0]
        for case in cases("h200_fit.json.gz#kernels")
        if (case["requested_density"], case["block_shape"]) == (density, [block, block])
    ]
    return [
        one["dense_us"] / min(one["kernels_us"].values())
        for one in results
        if least < one["dense_us"] <= most
    ]


def _win(speedups: Sequence[float]) -> str:
    """The median, and how many cases are faster than dense."""
    faster = sum(speedup > 1 for speedup in speedups)
    return f"{statistics.median(speedups):.1f}×, {faster} of {len(speedups)}"


_large = partial(_h200, "dds_nt", LARGE)


def _cpu(dtype: str, op: str, count: int, density: float, block: int) -> Iterator[float]:
    wanted = dtype, op, count, density, block, *WIDE
    names = "dtype", "op", "tokens", "density", "block", "in_features", "out_features"
    return (
        case["speedup"] for case in cases("cpu.json#amx") if tuple(case[name] for name in names) == wanted
    )


def _models(model: str, task: str, block: int) -> Iterator[str]:
    """Speedups at each density."""
    for case in cases("h200_models.json#graph"):
        if (case["model"], case["task"], case["mode"]) == (model, task, "graph"):
            for density in DENSITIES:
                yield times(
                    one["speedup"]
                    for one in case["results"]
                    if one["block_shape"] == [block, block] and one["density"] == density
                )
