"""Make the tables of README and of the pages in docs from benchmarks/results.

``<!-- table NAME -->`` … ``<!-- /table -->`` has a table between its marks, in the repository, too.
``<!-- generated … -->`` alone stands for what `docs/hooks.py` puts in its place when the site is built.

``<!-- table NAME -->`` is one of the tables in table_makers.py, eight_bit_tables.py, embedding_tables.py,
estimate_tables.py, expert_tables.py, compared_tables.py, language_tables.py and gpu_tables.py,
``<!-- report FILE -->`` all that benchmarks/report.py prints of a file,
``<!-- report FILE without host -->`` the same without the host's time.

python docs/tables.py               # writes those between marks
python docs/tables.py --check       # exit status 1 if a page has an outdated table
python docs/tables.py --print PAGE  # a page with what stands for its marks
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from compared_tables import COMPARED_TABLES
from eight_bit_tables import EIGHT_BIT_TABLES
from embedding_tables import EMBEDDING_TABLES
from estimate_tables import ESTIMATE_TABLES
from expert_tables import EXPERT_TABLES
from gpu_tables import GPU_TABLES
from language_tables import LANGUAGE_TABLES
from table_makers import TABLES
from table_parts import RESULTS, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import report

ALL_TABLES = TABLES | EIGHT_BIT_TABLES | EMBEDDING_TABLES | EXPERT_TABLES | COMPARED_TABLES
ALL_TABLES |= LANGUAGE_TABLES | GPU_TABLES | ESTIMATE_TABLES
GENERATED = re.compile(r"<!-- generated (table|report) (\S+)( without host)? -->")
MARK = re.compile(r"<!-- (table|report) (\S+)( without host)? -->\n.*?<!-- /\1 -->", re.S)
HOST = re.compile(r"### Host time.*?(?=###)", re.S)


def main(argv: Sequence[str] | None = None) -> int:
    """Write all tables, or compare them with --check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--print", type=Path, metavar="PAGE", help="print a page as the site has it")
    arguments = parser.parse_args(argv)
    check = arguments.check
    if arguments.print:
        print(generated(arguments.print.read_text()))
        return 0
    status = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        if (current := filled(text)) == text:
            continue
        if check:
            print(f"{page.relative_to(ROOT)} has outdated tables: run python docs/tables.py")
            status = 1
        else:
            page.write_text(current)
    return status


def filled(text: str) -> str:
    """Return a page with the tables between its marks made anew."""

    def remade(found: re.Match[str]) -> str:
        kind, name, without_host = found[1], found[2], found[3] or ""
        return f"<!-- {kind} {name}{without_host} -->\n\n{made(found)}\n<!-- /{kind} -->"

    return MARK.sub(remade, text)


def generated(text: str) -> str:
    """Return a page with tables in the place of marks for generated ones."""
    return GENERATED.sub(made, text)


def made(mark: re.Match[str]) -> str:
    """Return the Markdown that a mark names."""
    return ALL_TABLES[mark[2]]() if mark[1] == "table" else reported(mark[2], bool(mark[3]))


def reported(file: str, without_host: bool) -> str:
    """Return what benchmarks/report.py prints of a file of results."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        report.main([str(RESULTS / file)])
    text = HOST.sub("", printed.getvalue()) if without_host else printed.getvalue()
    return re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
