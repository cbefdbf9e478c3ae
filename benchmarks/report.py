"""Print results of the benchmarks as Markdown.

python benchmarks/report.py results.json [more.json ...]
python benchmarks/report.py results.json --sm80-floors
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import report_cpu
import stored
from numpy import interp

OPS = {"dds_nt": "Forward (dds)", "dds_nn": "Gradient of x (dds)", "sdd_tn": "Gradient of W (sdd)"}
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
Item = TypeVar("Item")
SMALL_BATCH = 128  # below it a product is memory-bound, and times say more than η
SM80_FLOORS = {16: 1.5, 32: 1.0, 64: 0.9, 128: 0.9}  # by the smaller side of a block, against Triton BSR


class Row(NamedTuple):
    """A measured contender and its case."""

    case: dict[str, Any]
    result: dict[str, Any]

    @property
    def who(self) -> str:
        name: str = self.result["contender"]
        return WHO.get(name, name)

    @property
    def block(self) -> str:
        return _block(self.case)

    @property
    def density(self) -> float:
        density: float = self.case["requested_density"]
        return density

    @property
    def is_small_batch(self) -> bool:
        tokens: int = self.case["tokens"]
        return tokens < SMALL_BATCH

    @property
    def dense_tflops(self) -> float:
        """TFLOP/s of the dense product timed beside it."""
        operations = 2 * self.case["tokens"] * self.case["out_features"] * self.case["in_features"]
        before, after = self.result["dense_us"]
        return float(operations / ((before + after) / 2) / 1e6)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; with --sm80-floors return 1 if a floor is missed or nothing was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results",
        nargs="+",
        help="of bench_ops.py, bench_models.py or bench_storages.py, or one of the others",
    )
    parser.add_argument("--metric", choices=METRICS, default="efficiency", help="(%(default)s)")
    parser.add_argument(
        "--sm80-floors",
        action="store_true",
        help="compare forward kernels whose names begin with sm80 with the tuned Triton BSR",
    )
    arguments = parser.parse_args(argv)
    documents = [run for file in arguments.results for run in stored.documents(file).values()]
    if arguments.sm80_floors:
        return int(not _print_floors(rows_of(documents)))
    for document in documents:
        print(f"{_environment(document['environment'])}\n")
    if "model" in documents[0]["cases"][0]:
        _print_models([case for document in documents for case in document["cases"]])
        return 0
    if "section" in documents[0]["cases"][0]:  # of bench_storages.py
        _print_storages([case for document in documents for case in document["cases"]])
        return 0
    if "way" in documents[0]["cases"][0]:  # of bench_parallel.py
        _print_parallel(documents[0]["cases"])
        return 0
    if "int8_us" in documents[0]["cases"][0]:  # of bench_cpu_eight_bits.py
        what, header, lines = report_cpu.eight_bits([one for run in documents for one in run["cases"]])
        print(f"{what}\n")
        _print_table(header, lines)
        return 0
    if "speedup" in documents[0]["cases"][0]:  # of bench_cpu.py
        _print_cpu(documents[0]["cases"])
        return 0
    _print_host(documents)
    _print_layers([row for row in rows_of(documents) if not row.is_small_batch], arguments.metric)
    _print_small_batches([row for row in rows_of(documents) if row.is_small_batch])
    return 0


def rows_of(documents: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return everything that bench_ops.py measured."""
    return [
        Row(case, result)
        for document in documents
        for case in document["cases"]
        for result in case["results"]
        if "unavailable" not in result
    ]


def _print_cpu(cases: Sequence[dict[str, Any]]) -> None:
    """Print speedups over dense at both densities: a line per product, a column per block."""
    print("Speedup over dense PyTorch at density .25 / .5\n")
    lines: dict[tuple[str, str], dict[int, list[str]]] = {}
    for case in cases:
        product = (
            f"{case['dtype']} {case['op']}",
            f"{case['tokens']} x {case['in_features']} → {case['out_features']}",
        )
        cells = lines.setdefault(product, {})
        cells.setdefault(case["block"], []).append(f"{case['speedup']:.2f}")
    blocks = sorted({case["block"] for case in cases})
    _print_table(
        ["", "tokens x in → out", *(f"{block}x{block}" for block in blocks)],
        ([*product, *(" / ".join(cells[block]) for block in blocks)] for product, cells in lines.items()),
    )


def _print_storages(cases: Sequence[dict[str, Any]]) -> None:
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


def _mask_cells(case: dict[str, Any], names: Iterable[str]) -> list[str | None]:
    cells = {
        result["contender"]: _cell(result, f"{result['t_us'] / 1e3:.3g}")
        for result in case["results"]
        if "t_us" in result
    }
    return [f"{case['out_features']}x{case['in_features']}", *map(cells.get, names)]


def _storage_cells(case: dict[str, Any], names: Iterable[str]) -> list[str | None]:
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


def _block(case: dict[str, Any]) -> str:
    return "x".join(map(str, case["block_shape"]))


def _print_parallel(cases: Sequence[dict[str, Any]]) -> None:
    """Print a line for each way to train a model, of its slowest process."""
    lines = []
    for case in cases:
        if "unavailable" in case:
            print(f"- {case['contender']}, {case['way']}: {case['unavailable'].strip().splitlines()[0]}")
            continue
        slowest = max(case["results"], key=lambda result: float(result["step_ms"]))
        peak, apart = slowest["peak_bytes"], slowest.get("loss_difference")
        lines.append(
            [
                case["contender"],
                case["way"],
                f"{slowest['step_ms']:.1f}",
                f"{sum(slowest['state_bytes'].values()) / 1e9:.2f}",
                None if peak is None else f"{peak / 1e9:.2f}",
                f"{sum(slowest['sent_bytes'].values()) / 1e9:.2f}",
                f"{slowest['losses'][-1]:.4f}",
                None if apart is None else f"{apart:.1e}{' wrong' if slowest['wrong'] else ''}",
            ]
        )
    header = ["", "way", "ms per step", "GB of state", "peak GB", "GB sent per step", "last loss"]
    _print_table([*header, "from one process, relative"], lines)


def _interpolated(case: dict[str, Any], by: str, at: float, what: str) -> float:
    """Return a value between two evaluations of a contender."""
    results = case["results"]
    return float(interp(at, [result[by] for result in results], [result[what] for result in results]))


def _print_models(cases: Sequence[dict[str, Any]]) -> None:
    """Print a table for each model and task, then the cases that could not be measured."""
    for heading, group in _grouped_cases(cases).items():
        print(f"### {heading}\n\ntime in ms / speedup over dense / peak memory in GB\n")
        densities = sorted({result["density"] for case in group for result in case["results"]}, reverse=True)
        lines: dict[tuple[str, str], dict[float | None, str]] = defaultdict(dict)
        for case in group:
            for result in case["results"]:
                line = lines[case["mode"], "x".join(map(str, result["block_shape"]))]
                if "unavailable" not in result:
                    line[None] = _dense_cell(case, result)
                    line[result["density"]] = _model_cell(result)
        _print_table(
            ["mode", "block", "dense", *(f"density {density:g}" for density in densities)],
            ([*key, *map(line.get, (None, *densities))] for key, line in lines.items()),
        )
        _print_unavailable(group)


def _grouped_cases(cases: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        size = ", ".join(f"{name} {number}" for name, number in case["size"].items() if number)
        groups[f"{case['model']}, {case['task']} ({size})"].append(case)
    return groups


def _dense_cell(case: dict[str, Any], result: dict[str, Any]) -> str:
    return f"{sum(result['dense_us']) / 2e3:.3g}{_gigabytes(case)}"


def _model_cell(result: dict[str, Any]) -> str:
    text = f"{result['t_us'] / 1e3:.3g} / {result['speedup']:.2f}x{_gigabytes(result)}"
    return _cell({"wrong": False} | result, text)  # a step of training has no output to check


def _gigabytes(record: dict[str, Any]) -> str:
    return "" if record["peak_bytes"] is None else f" / {record['peak_bytes'] / 1e9:.2f}"


def _print_unavailable(cases: Iterable[dict[str, Any]]) -> None:
    for case in cases:
        for record in (case, *case["results"]):
            if "unavailable" in record:
                block = "x".join(map(str, record.get("block_shape", ())))
                what = f"{block} at density {record['density']:g}" if block else "all"
                print(f"- {case['mode']}, {what}: {record['unavailable'].strip().splitlines()[0]}")
    print()


def _environment(environment: dict[str, Any]) -> str:
    names = ("gpu", "driver", "cuda", "torch", "triton", "stk", "tilesparse", "commit", "date")
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


def _print_host(documents: Iterable[dict[str, Any]]) -> None:
    costs: dict[str, dict[str, str]] = defaultdict(dict)
    for document in documents:
        for record in document["host"]:
            if "host_us" in record:
                costs[WHO.get(record["contender"], record["contender"])][record["op"]] = (
                    f"{record['host_us']:.1f}"
                )
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
        for (block, who), line in _grouped(group, lambda row: (row.block, row.who)).items():
            cells = {
                (row.case["shape"], row.density): _cell(row.result, form.format(row.result[metric]))
                for row in line
            }
            lines.append(
                [
                    block,
                    who,
                    *(_slashed(cells.get((shape, density)) for density in densities) for shape in shapes),
                ]
            )
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
        keys = _grouped(group, lambda row: (row.case["shape"], row.block, row.who))
        for (shape, block, who), line in keys.items():
            cells = {row.density: _cell(row.result, _memory_cell(row)) for row in line}
            lines.append([shape, block, who, *map(cells.get, densities)])
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


def _print_floors(rows: Sequence[Row]) -> bool:
    lines, misses = [], 0
    forward = [row for row in rows if row.case["op"] == "dds_nt" and not row.is_small_batch]
    for (heading, shape, block, density), group in _grouped(
        forward, lambda row: (_section(row), row.case["shape"], row.block, row.density)
    ).items():
        ours = [
            row
            for row in group
            if row.result.get("kernel", "").startswith("sm80") and not row.result["wrong"]
        ]
        triton = [row for row in group if row.result["contender"] == "triton"]
        if not ours or not triton:
            continue
        best = max(ours, key=lambda row: float(row.result["efficiency"]))
        ratio = best.result["efficiency"] / triton[-1].result["efficiency"]
        floor = SM80_FLOORS[min(best.case["block_shape"])]
        misses += ratio < floor
        lines.append(
            [
                heading,
                shape,
                block,
                f"{density:g}",
                f"{best.result['efficiency']:.2f}",
                f"{triton[-1].result['efficiency']:.2f}",
                f"{ratio:.2f}",
                f"{floor:g}",
                "missed" if ratio < floor else "met",
            ]
        )
    _print_table(["", "shape", "block", "density", "η tilesparse", "η Triton", "ratio", "floor", ""], lines)
    print(f"{len(lines) - misses} of {len(lines)} floors met")
    return bool(lines) and not misses


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
