"""Results as benchmarks/results keeps them: one run in a file or several, large ones in columns.

    python benchmarks/stored.py run.json benchmarks/results/h200_models.json#captured

adds a run to a file. FILE#RUN names one run of a file.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Document = dict[str, Any]
ONLY = ""  # the name of the run of a file that has one run


def documents(file: str | Path) -> dict[str, Document]:
    """Read the runs of a file by name, or the one that is named after #."""
    path, _, run = str(file).partition("#")
    data = Path(path).read_bytes()
    found: Document = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)
    runs: dict[str, Document] = found.get("runs", {ONLY: found})
    if run:
        runs = {run: runs[run]}
    return {
        name: one | {"cases": rows(one["cases"])} if _is_packed(one) else one for name, one in runs.items()
    }


def document(file: str | Path) -> Document:
    """Read the only run of a file, or the one that is named after #."""
    runs = documents(file)
    if len(runs) != 1:
        raise ValueError(f"file must name one of its runs, as in {file}#{next(iter(runs))}")
    return next(iter(runs.values()))


def write(path: Path, runs: Mapping[str, Document]) -> None:
    """Write runs with a line for each case; compressed and in columns if the name of the file ends in .gz."""
    if path.suffix == ".gz":
        packed = {name: one | {"cases": columns(one["cases"])} for name, one in runs.items()}
        path.write_bytes(gzip.compress(json.dumps({"runs": packed}, separators=(",", ":")).encode(), mtime=0))
    elif [*runs] == [ONLY]:
        path.write_text(_lines(runs[ONLY]) + "\n")
    else:
        each = (f"{json.dumps(name)}: {_lines(one)}" for name, one in runs.items())
        path.write_text('{"runs": {\n' + ",\n".join(each) + "\n}}\n")


def columns(rows: Sequence[Mapping[str, Any]]) -> Document:
    """Return rows as a list for each field; `fields` are those of each kind of row, in their order."""
    kinds = list(dict.fromkeys(tuple(row) for row in rows))
    number = {kind: place for place, kind in enumerate(kinds)}
    names = dict.fromkeys(name for kind in kinds for name in kind)
    return {
        "fields": kinds,
        "kind": [number[tuple(row)] for row in rows] if len(kinds) > 1 else len(rows),
        "columns": {name: _packed([row[name] for row in rows if name in row]) for name in names},
    }


def rows(packed: Mapping[str, Any]) -> list[Document]:
    """Return the rows that `columns` was given."""
    values = {name: iter(_unpacked(column)) for name, column in packed["columns"].items()}
    kinds = packed["kind"] if isinstance(packed["kind"], list) else [0] * packed["kind"]
    return [{name: next(values[name]) for name in packed["fields"][kind]} for kind in kinds]


def _packed(values: list[Any]) -> Any:
    """Return a column; rows in it, alone or each in a list of one, become columns themselves."""
    if all(isinstance(value, dict) for value in values):
        return columns(values)
    if all(isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) for value in values):
        return columns([value[0] for value in values]) | {"in_lists": True}
    return values


def _unpacked(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    found = rows(column)
    return [[row] for row in found] if "in_lists" in column else found


def _is_packed(run: Document) -> bool:
    return isinstance(run.get("cases"), dict) and "columns" in run["cases"]


def _lines(run: Document) -> str:
    """Return JSON with a line for each field, and for each case."""
    texts = []
    for name, value in run.items():
        if name == "cases" and isinstance(value, list):
            text = "[\n" + ",\n".join(_compact(case) for case in value) + "\n]"
        else:
            text = _compact(value)
        texts.append(f"{json.dumps(name)}: {text}")
    return "{" + ",\n".join(texts) + "}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def main(arguments: Sequence[str]) -> int:
    """Add a run to a file."""
    source, target = arguments
    path, _, run = target.partition("#")
    kept = documents(path) if Path(path).exists() else {}
    write(Path(path), {**kept, run or ONLY: document(source)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
