"""Prints the density from which dense is faster, for each product and block size, as JSON.

python benchmarks/break_even.py results.json [more.json ...] > python/tilesparse/cli/break_even.json

Results are those of bench_ops.py. `tilesparse info` shows what this prints.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import stored
from report import Row, rows_of

OPS = {"dds_nt": "forward", "dds_nn": "dgrad", "sdd_tn": "wgrad"}
SHAPES = ("up", "down")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", help="of bench_ops.py")
    documents = [run for file in parser.parse_args(argv).results for run in stored.documents(file).values()]
    print(json.dumps(break_even(documents), indent=1))
    return 0


def break_even(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document: {"gpu", "dtype", "layers", "densities": {product: {block size: density}}}.

    A density is the lower of those of the two layers, from this library's choice of kernels.
    """
    rows = [row for row in rows_of(documents) if _counts(row)]
    relative: dict[tuple[str, int, str], dict[float, float]] = defaultdict(dict)
    for row in rows:
        key = (OPS[row.case["op"]], row.case["block_shape"][0], row.case["shape"])
        relative[key][row.case["density"]] = 1 / row.result["speedup"]
    densities: dict[str, dict[str, float]] = {op: {} for op in OPS.values()}
    for (op, block, _), times in sorted(relative.items()):
        density = round(crossing(times), 2)
        densities[op][str(block)] = min(density, densities[op].get(str(block), 1.0))
    return {
        "gpu": documents[0]["environment"]["gpu"],
        "dtype": "bfloat16",
        "layers": sorted({_layer(row.case) for row in rows}),
        "densities": densities,
    }


def crossing(times: Mapping[float, float]) -> float:
    """Return the density, from 0 to 1, at which the line through the nearest two points reaches 1."""
    points = sorted(times.items())
    slower = next((place for place, (_, time) in enumerate(points) if time >= 1), len(points))
    place = min(max(slower, 1), len(points) - 1)
    (left, before), (right, after) = points[place - 1 : place + 1]
    if after <= before:  # all are slower, or all are faster, and noise is larger than the slope
        return 0.0 if slower == 0 else 1.0
    return min(1.0, max(0.0, left + (1 - before) * (right - left) / (after - before)))


def _counts(row: Row) -> bool:
    case = row.case
    return (
        row.result["contender"] == "tilesparse"
        and case["op"] in OPS
        and case["shape"] in SHAPES
        and case["dtype"] == "bf16"
        and case["pattern"] == "random"
        and case["x_layout"] == "row"
        and case["block_shape"][0] == case["block_shape"][1]
    )


def _layer(case: Mapping[str, Any]) -> str:
    return f"{case['in_features']} -> {case['out_features']} features, {case['tokens']} tokens"


if __name__ == "__main__":
    raise SystemExit(main())
