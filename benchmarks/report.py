"""Print results of the benchmarks as Markdown.

python benchmarks/report.py results.json [more.json ...]
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import stored

OPS = {"dds_nt": "Forward (dds)", "dds_nn": "Gradient of x (dds)", "sdd_tn": "Gradient of W (sdd)"}
PRODUCTS = {"dds_nt": "forward", "dds_nn": "dgrad", "sdd_tn": "wgrad"}
WHO = {
    "packed": "tilesparse, prepacked",
    "triton": "PyTorch Triton BSR, tuned",
    "stk": "STK",
    "dense": "dense, cuBLAS",
}
METRICS = {
    "efficiency": ("η = t_dense · density / t", "{:.2f}"),
    "speedup": ("speedup over dense", "{:.2f}x"),
    "t_us": ("time in µs", "{:.0f}"),
    "tflops": ("TFLOP/s on non-zeros", "{:.0f}"),
}
SECTIONS = {
    "few tokens": "small batch",
    "sm80": "kernels for compute capability 8.0",
}  # others by their names
Case = Mapping[str, Any]
Item = TypeVar("Item")
SMALL_BATCH = 128  # below it a product is memory-bound, and times say more than η


class Row(NamedTuple):
    """A measured contender and its case."""

    case: dict[str, Any]
    result: dict[str, Any]

    @property
    def who(self) -> str:
        name: str = self.result["contender"]
        return WHO.get(name, name)

    @property
    def density(self) -> float:
        density: float = self.case["requested_density"]
        return density

    @property
    def is_small_batch(self) -> bool:
        tokens: int = self.case["tokens"]
        return tokens < SMALL_BATCH


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", help="that any of the benchmarks has written")
    parser.add_argument("--metric", choices=METRICS, default="efficiency", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    documents = [run for file in arguments.results for run in stored.documents(file).values()]
    for document in documents:
        print(f"{_environment(document['environment'])}\n")
    cases = [case for document in documents for case in document["cases"]]
    rows = rows_of(documents)
    if "section" in cases[0]:  # of bench_storages.py
        _print_storages(cases)
    elif "int8_us" in cases[0]:  # of products in int8 on a CPU
        _print_cpu_eight_bits(cases)
    elif "dense_ms" in cases[0] and "op" in cases[0]:  # of bench_cpu.py
        _print_cpu(cases)
    elif rows and "efficiency" in rows[0].result:  # of bench_ops.py
        _print_host(documents)
        _print_layers([row for row in rows if not row.is_small_batch], arguments.metric)
        _print_small_batches([row for row in rows if row.is_small_batch])
    else:
        _print_any(cases)
    return 0


def rows_of(documents: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return everything that was measured."""
    return [
        Row(case, result)
        for document in documents
        for case in document["cases"]
        for result in case.get("results", ())
        if "unavailable" not in result
    ]


def break_even(documents: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """From which density dense is faster: {product: {block size: density}}, the lower of two layers."""
    rows = [row for row in rows_of(documents) if _counts(row)]
    relative: dict[tuple[str, int, str], dict[float, float]] = defaultdict(dict)
    for row in rows:
        key = (PRODUCTS[row.case["op"]], row.case["block_shape"][0], row.case["shape"])
        relative[key][row.case["density"]] = 1 / row.result["speedup"]
    densities: dict[str, dict[str, float]] = {op: {} for op in PRODUCTS.values()}
    for (op, block, _), times in sorted(relative.items()):
        density = round(crossing(times), 2)
        densities[op][str(block)] = min(density, densities[op].get(str(block), 1.0))
    return densities


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
        and case["shape"] in ("up", "down")
        and case["dtype"] == "bf16"
        and case["pattern"] == "random"
        and case["x_layout"] == "row"
        and case["block_shape"][0] == case["block_shape"][1]
    )


def _print_any(cases: Iterable[Case]) -> None:
    """Print a line for each result, with the fields of its case, and a table for each kind of line."""
    nothing: list[Case] = [{}]
    lines = [_flat(case) | _flat(result) for case in cases for result in case.get("results") or nothing]
    for fields, group in _grouped(lines, tuple).items():
        _print_table(fields, ([line[field] for field in fields] for line in group))


def _flat(record: Case) -> dict[str, str]:
    """Return the fields of a record as texts; of lists those that are shapes."""
    found: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name} {key}": text for key, text in _flat(value).items()}
        elif not isinstance(value, list):
            found[name] = f"{value:.4g}" if isinstance(value, float) else str(value).strip().splitlines()[0]
        elif value and all(isinstance(one, int) for one in value):
            found[name] = "x".join(map(str, value))
    return found


def _print_cpu(cases: Iterable[Case]) -> None:
    """Print speedups over dense at both densities: a line per product, a column per block."""
    print("Speedup over dense PyTorch at density .25 / .5\n")

    def line(case: Case) -> tuple[str, str]:
        layer = f"{case['tokens']} x {case['in_features']} → {case['out_features']}"
        return f"{case['dtype']} {case['op']}", layer

    lines = []
    blocks = _by_block(cases)
    for product, group in _grouped(cases, line).items():
        of_blocks = _grouped(group, lambda case: case["block"])
        cells = (" / ".join(f"{case['speedup']:.2f}" for case in of_blocks[block]) for block in blocks)
        lines.append([*product, *cells])
    _print_table(["", "tokens x in → out", *blocks.values()], lines)


def _print_cpu_eight_bits(cases: Iterable[Case]) -> None:
    what = "Time of int8, speedup over the fastest dense int8 product, and over the same blocks in bfloat16"
    print(f"{what}\n")
    lines = []
    blocks = _by_block(cases)
    cases = sorted(cases, key=lambda case: int(case["block"]))
    groups = _grouped(cases, lambda case: (case["in_features"], case["out_features"], case["density"]))
    for (in_features, out_features, density), group in groups.items():
        name, time = min(group[0]["dense_us"].items(), key=lambda item: item[1])
        cells = (
            f"{case['int8_us'] / 1e3:.2f} ms, {case['speedup']:.2f}×,"
            f" {case['own_us']['bfloat16'] / case['int8_us']:.2f}×"
            for case in group
        )
        layer = f"{in_features} → {out_features}"
        lines.append([layer, f"{density:g}", f"{time / 1e3:.2f} ms ({name})", *cells])
    _print_table(["layer", "density", "dense int8", *blocks.values()], lines)


def _by_block(cases: Iterable[Case]) -> dict[int, str]:
    """Return the headings of columns by square block."""
    return {block: f"{block}x{block}" for block in sorted({case["block"] for case in cases})}


def _print_storages(cases: Sequence[Case]) -> None:
    """Print a table for each section, then the cases that could not be measured."""
    for section, group in _grouped(cases, lambda case: case["section"]).items():
        names = dict.fromkeys(result["contender"] for case in group for result in case["results"])
        if section == "masks":
            header, cells_of, what = ["out x in"], _mask_cells, "time in ms"
        else:
            header = ["tokens x out x in", "block", "density", "dense", "dense blocks"]
            cells_of, what = _storage_cells, "time in µs / speedup over dense blocks / over dense"
        print(f"### {SECTIONS.get(section, section)}\n\n{what}\n")
        _print_table([*header, *names], (cells_of(case, names) for case in group))
        missing = [(case, record) for case in group for record in (case, *case["results"])]
        missing = [pair for pair in missing if "unavailable" in pair[1]]
        for case, record in missing:
            layer = f"{case['shape']}, {_block(case)}, density {case['requested_density']:g}"
            reason = record["unavailable"].strip().splitlines()[0]
            print(f"- {layer}, {record.get('contender', 'all')}: {reason}")
        if missing:
            print()


def _mask_cells(case: Case, names: Iterable[str]) -> list[str | None]:
    cells = {
        result["contender"]: _cell(result, f"{result['t_us'] / 1e3:.3g}")
        for result in case["results"]
        if "t_us" in result
    }
    return [f"{case['out_features']}x{case['in_features']}", *map(cells.get, names)]


def _storage_cells(case: Case, names: Iterable[str]) -> list[str | None]:
    """Times of the dense product and of dense blocks are medians of those beside every contender."""
    results = [result for result in case["results"] if "t_us" in result]
    size = "x".join(str(case[name]) for name in ("tokens", "out_features", "in_features"))
    cells: list[str | None] = [size, _block(case), f"{case['requested_density']:g}"]
    for beside in ("dense_us", "plain_us"):
        times = [time_us for result in results for time_us in result[beside]]
        cells.append(_microseconds(statistics.median(times)) if times else None)
    return cells + list(map({result["contender"]: _storage_cell(result) for result in results}.get, names))


def _storage_cell(result: dict[str, Any]) -> str:
    speedups = f"{result['speedup_over_plain']:.2f}x / {result['speedup']:.2f}x"
    expanded = " decompressed" if result.get("expanded") else ""
    return _cell(result, f"{_microseconds(result['t_us'])} / {speedups}{expanded}")


def _microseconds(time_us: float) -> str:
    return f"{time_us:.{0 if time_us >= 100 else 1}f}"


def _block(case: Case) -> str:
    return "x".join(map(str, case["block_shape"]))


def _environment(environment: dict[str, Any]) -> str:
    names = ("gpu", "driver", "cuda", "torch", "triton", "stk", "tilesparse", "commit", "date")
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


def _print_host(documents: Iterable[dict[str, Any]]) -> None:
    costs: dict[str, dict[str, str]] = defaultdict(dict)
    for record in (record for document in documents for record in document.get("host", ())):
        if "host_us" in record:
            who = WHO.get(record["contender"], record["contender"])
            costs[who][record["op"]] = f"{record['host_us']:.1f}"
    if costs:
        print("### Host time of one eager call, in µs\n")
        _print_table(["", *OPS.values()], [[who, *map(cells.get, OPS)] for who, cells in costs.items()])


def _print_layers(rows: Sequence[Row], metric: str) -> None:
    title, form = METRICS[metric]
    for heading, group in _grouped(rows, _section).items():
        densities = sorted({row.density for row in group}, reverse=True)
        shapes = list(dict.fromkeys(row.case["shape"] for row in group))
        print(f"### {heading}\n\n{title} at density {_slashed(f'{density:g}' for density in densities)}\n")
        lines = []
        group = sorted(group, key=lambda row: row.case["block_shape"])
        for key, line in _grouped(group, lambda row: (_block(row.case), row.who)).items():
            cells = {
                (row.case["shape"], row.density): _cell(row.result, form.format(row.result[metric]))
                for row in line
            }
            of_shapes = (_slashed(cells.get((shape, density)) for density in densities) for shape in shapes)
            lines.append([*key, *of_shapes])
        _print_table(["block", "", *shapes], lines)


def _print_small_batches(rows: Sequence[Row]) -> None:
    for heading, group in _grouped(rows, _section).items():
        densities = sorted({row.density for row in group}, reverse=True)
        print(
            f"### {heading}, small batch\n\n"
            "time in µs / TB/s of values and activations / speedup over dense / "
            "time over bytes / (3 TB/s) + 6 µs\n"
        )
        lines = []
        keys = _grouped(group, lambda row: (row.case["shape"], _block(row.case), row.who))
        for key, line in keys.items():
            cells = {row.density: _cell(row.result, _memory_cell(row)) for row in line}
            lines.append([*key, *map(cells.get, densities)])
        _print_table(["shape", "block", "", *(f"density {density:g}" for density in densities)], lines)


def _memory_cell(row: Row) -> str:
    time_us, bytes_ = row.result["t_us"], row.case["bytes"]
    return (
        f"{time_us:.1f} / {row.result['gb_per_s'] / 1e3:.2f} / "
        f"{row.result['speedup']:.2f}x / {time_us / (bytes_ / 3e6 + 6):.2f}"
    )


def _section(row: Row) -> str:
    case = row.case
    layout = "" if case["x_layout"] == "row" else ", column-major activations"
    return f"{OPS[case['op']]}, {case['dtype']}, {case['pattern']} pattern{layout}"


def _cell(result: dict[str, Any], text: str) -> str:
    if result["wrong"]:
        return f"{text} wrong"
    return f"{text}*" if result["unsteady"] else text


def _slashed(parts: Iterable[str | None]) -> str:
    return " / ".join(part or "-" for part in parts)


def _grouped(rows: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    groups: dict[Any, list[Item]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _print_table(header: Sequence[str], lines: Iterable[Sequence[str | None]]) -> None:
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    for line in lines:
        print(f"| {' | '.join(cell or '-' for cell in line)} |")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
