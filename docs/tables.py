"""Write the tables of README and of the pages in docs from benchmarks/results, between their marks.

``<!-- table NAME -->`` is one of the tables in table_makers.py, eight_bit_tables.py, embedding_tables.py,
estimate_tables.py, expert_tables.py, compared_tables.py, language_tables.py and gpu_tables.py,
``<!-- report FILE -->`` all that benchmarks/report.py prints of a file,
``<!-- report FILE without host -->`` the same without the host's time.

python docs/tables.py            # writes them
python docs/tables.py --check    # exit status 1 if a page has an outdated table
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

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
MARK = re.compile(r"<!-- (table|report) (\S+)( without host)? -->\n.*?<!-- /\1 -->", re.S)
HOST = re.compile(r"### Host time.*?(?=###)", re.S)


def main(argv: Sequence[str] | None = None) -> int:
    """Write all tables, or compare them with --check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args(argv).check
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
    """Return a page with its tables made anew."""

    def remade(found: re.Match[str]) -> str:
        kind, name, without_host = found[1], found[2], found[3] or ""
        made = ALL_TABLES[name]() if kind == "table" else reported(name, bool(without_host))
        return f"<!-- {kind} {name}{without_host} -->\n\n{made}\n<!-- /{kind} -->"

    return MARK.sub(remade, text)


def reported(file: str, without_host: bool) -> str:
    """Return what benchmarks/report.py prints of a file of results."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        report.main([str(RESULTS / file)])
    text = HOST.sub("", printed.getvalue()) if without_host else printed.getvalue()
    return re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
