"""The tables of products whose both factors have 8 bits; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from table_makers import BLOCKS, DENSITIES, LARGE
from table_parts import cases, short, table, times

PRODUCTS = {"H200": "h200_eight_bits.json"}
DTYPES = ("int8", "float8")


def eight_bits() -> str:
    """Speedups over the dense float8 product of the large layers, by GPU, density and block."""
    lines = [
        [
            gpu,
            dtype,
            short(density),
            *(times(_speedups(gpu, dtype, LARGE, density, block)) for block in BLOCKS[1:]),
        ]
        for gpu in PRODUCTS
        for dtype in DTYPES
        for density in DENSITIES
    ]
    return table(["", "both factors", "density", *(f"{block} × {block}" for block in BLOCKS[1:])], lines)


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
                f"{statistics.mean(one['dense_us']):.0f}",
                f"{one['dense_bf16_us']:.0f}",
                f"{one['sparse_bf16_us']:.0f}",
                f"{one['quantize_us']:.0f}",
                f"{one['eta']:.2f}".removeprefix("0"),
            ]
        )
    header = ["", "both factors", "layer", "block", "density", "sparse", "dense float8", "dense bfloat16"]
    return table([*header, "sparse bfloat16", "quantizing x", "η"], lines)


def _all() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for gpu, file in PRODUCTS.items():
        for case in cases(file):
            yield gpu, case["dtype"], case


def _speedups(gpu: str, dtype: str, shapes: tuple[str, ...], density: float, block: int) -> Iterator[float]:
    for case in cases(PRODUCTS[gpu]):
        wanted = dtype, density, [block, block]
        if (case["dtype"], case["requested_density"], case["block_shape"]) == wanted and case[
            "shape"
        ] in shapes:
            yield case["results"][0]["speedup"]


EIGHT_BIT_TABLES: dict[str, Callable[[], str]] = {
    maker.__name__: maker for maker in (eight_bits, eight_bit_products)
}
