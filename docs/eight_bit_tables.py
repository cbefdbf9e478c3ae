"""The tables of what 8 and 4 bits save and cost; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from table_makers import BLOCKS, DENSITIES, LARGE
from table_parts import cases, short, table, times

DTYPES = ("int8", "float8")
PRODUCTS = {
    "H200": dict.fromkeys(DTYPES, "h200_eight_bits.json#products"),
    "H100": dict.fromkeys(DTYPES, "h100_eight_bits.json#products"),
}
SCALED = "h200_eight_bits.json#scaled"
TWO_FOUR = "h200_two_four.json"


def eight_bits() -> str:
    """Speedups over the dense float8 product of the large layers, by GPU, density and block."""
    blocks = BLOCKS[1:]
    lines = [
        [
            gpu,
            short(density),
            *(
                " / ".join(times(_speedups(gpu, dtype, LARGE, density, block)) for dtype in DTYPES)
                for block in blocks
            ),
        ]
        for gpu in PRODUCTS
        for density in DENSITIES
    ]
    return table(["int8 / float8", "density", *(f"{block} × {block}" for block in blocks)], lines)


def eight_bit_products() -> str:
    """Every layer: µs of ours, of dense float8 and bfloat16, and of quantizing the input."""
    lines = []
    for gpu, dtype, case in _all():
        (one,) = case["results"]
        lines.append(
            [
                gpu,
                dtype,
                f"{case['tokens']}×{case['out_features']}×{case['in_features']}",
                f"{case['block_shape'][0]}",
                short(case["requested_density"]),
                f"{one['sparse_us']:.0f}",
                f"{one['two_four_us']:.0f}" if "two_four_us" in one else "-",
                f"{statistics.mean(one['dense_us']):.0f}",
                f"{one['dense_bf16_us']:.0f}",
                f"{one['sparse_bf16_us']:.0f}",
                f"{one['quantize_us']:.0f}",
                f"{one['eta']:.2f}".removeprefix("0"),
            ]
        )
    header = ["", "both factors", "layer", "block", "density", "sparse", "with 2:4", "dense float8"]
    return table([*header, "dense bfloat16", "sparse bfloat16", "quantizing x", "η"], lines)


def scaled_products() -> str:
    """Scales inside of the sums: µs of ours, and of PyTorch's dense products with these and by row."""
    lines = []
    for case in cases(SCALED):
        (one,) = case["results"]
        if "unavailable" in one:  # PyTorch has no dense product of these widths to compare with
            continue
        lines.append(
            [
                f"{case['tokens']}×{case['out_features']}×{case['in_features']}",
                short(case["requested_density"]),
                f"{one['sparse_us']:.0f}",
                f"{statistics.mean(one['dense_us']):.0f}",
                f"{one['dense_by_row_us']:.0f}",
                f"{one['quantize_us']:.0f}",
                f"{one['eta']:.2f}".removeprefix("0"),
            ]
        )
    header = ["layer", "density", "sparse", "dense, the same scales", "dense, scales of rows"]
    return table([*header, "quantizing x", "η"], lines)


def eight_bits_8_0() -> str:
    """The kernels for compute capability 8.0 on a newer GPU: µs in int8 and in bfloat16."""
    lines = []
    for case in cases("sm80.json#int8"):
        (one,) = case["results"]
        lines.append(
            [
                f"{case['tokens']}×{case['out_features']}×{case['in_features']}",
                f"{case['block_shape'][0]}",
                short(case["requested_density"]),
                f"{one['sparse_bf16_us']:.0f}",
                f"{one['sparse_us']:.0f}",
                f"{one['sparse_bf16_us'] / one['sparse_us']:.2f}×",
            ]
        )
    return table(["layer", "block", "density", "bfloat16", "int8", "speedup"], lines)


def eight_bit_models() -> str:
    """Whole models with weights and activations in int8, beside dense float8."""
    lines = [
        [
            case["model"],
            {"graph": "eager", "compile-graph": "compiled"}[case["mode"]],
            short(one["density"]),
            f"{statistics.mean(one['dense_us']) / 1e3:.2f} ms",
            f"{one['t_us'] / 1e3:.2f} ms",
            f"{one['speedup']:.2f}×",
        ]
        for case in cases("h100_models.json#eight_bits")
        for one in case["results"]
    ]
    return table(["model", "code", "density", "dense float8", "sparse int8", "speedup"], lines)


def two_four() -> str:
    """2:4 with every block kept: µs of ours, of cuSPARSELt's products, and of a dense one."""
    lines = []
    for case in cases(TWO_FOUR):
        ours, default, best = case["results"]
        times = [statistics.mean(ours["dense_us"]), *(one["t_us"] for one in (default, best, ours))]
        lines.append(
            [
                case["dtype"],
                f"{case['tokens']}×{case['out_features']}×{case['in_features']}",
                *(f"{time:.0f}" for time in times),
                f"{best['t_us'] / ours['t_us']:.2f}×",
            ]
        )
    header = ["", "layer", "dense", "cuSPARSELt", "its best algorithm", "2:4 in blocks of 128"]
    return table([*header, "over the best"], lines)


def four_bits() -> str:
    """Decode with weights in 8 and 4 bits, beside dense bfloat16 and PyTorch's dense int4."""
    measured = cases("h100_eight_bits.json#int4")
    peers = {
        case["tokens"]: one["t_us"]
        for case in measured
        for one in case["results"]
        if one["contender"].startswith("dense int4")
    }
    lines = []
    for case in measured:
        found = {one["contender"]: one for one in case["results"]}
        int4 = found["int4"]
        lines.append(
            [
                str(case["tokens"]),
                str(case["block_shape"][0]),
                short(case["density"]),
                f"{statistics.mean(int4['dense_us']):.0f}",
                f"{peers[case['tokens']]:.0f}",
                f"{statistics.mean(int4['plain_us']):.0f}",
                f"{found['int8']['t_us']:.0f}",
                f"{int4['t_us']:.0f}",
                f"{int4['stored_bytes'] / int4['t_us'] / 1e6:.2f}",
            ]
        )
    header = ["tokens", "block", "density", "dense bfloat16", "dense int4", "dense blocks", "int8", "int4"]
    return table([*header, "TB/s of int4"], lines)


def quantized_minilm() -> str:
    """Cosines to the embeddings of MiniLM's dense model, quantized with and without data."""
    measured = cases("cpu_quantization.json#minilm") + cases("cpu_quantization.json#minilm_pruned")
    return _quality(measured, lambda one, _: f"{one:.4f}".removeprefix("0"))


def quantized_smollm2() -> str:
    """Perplexities of SmolLM2 by text, and what they are over those of dense blocks."""
    return _quality(
        cases("h100_quantization_smollm2.json"),
        lambda one, plain: f"{one:.2f}" if one == plain else f"{one:.2f} ({100 * (one / plain - 1):+.1f} %)",
    )


def _quality(measured: list[dict[str, Any]], shown: Callable[[float, float], str]) -> str:
    """Return a row for each way of storing a model; `shown` takes its result, and that of dense blocks."""
    lines = []
    for case in measured:
        plain = case["results"][0]
        for one in case["results"]:
            by = "`quantize_`" if one.get("calibrated") else "`to_storage`"
            if "static" in (one["activations"] or ""):
                by = "the largest"
            lines.append(
                [
                    short(case["density"]),
                    one["storage"].removesuffix("_e4m3fn"),
                    (one["activations"] or "-").replace("_e4m3fn", ""),
                    "" if one is plain else by,
                    *(shown(one[text], plain[text]) for text in ("reference", "docstrings")),
                ]
            )
    return table(["density", "weights", "activations", "by", "Python's reference", "docstrings"], lines)


def _all() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for gpu, runs in PRODUCTS.items():
        for dtype, run in runs.items():
            for case in cases(run):
                if case["dtype"] == dtype:
                    yield gpu, dtype, case


def _speedups(gpu: str, dtype: str, shapes: tuple[str, ...], density: float, block: int) -> Iterator[float]:
    for case in cases(PRODUCTS[gpu][dtype]):
        wanted = dtype, density, [block, block]
        if (case["dtype"], case["requested_density"], case["block_shape"]) == wanted and case[
            "shape"
        ] in shapes:
            yield case["results"][0]["speedup"]


EIGHT_BIT_TABLES: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (
        eight_bits,
        eight_bit_products,
        scaled_products,
        eight_bits_8_0,
        eight_bit_models,
        two_four,
        four_bits,
        quantized_minilm,
        quantized_smollm2,
    )
}
