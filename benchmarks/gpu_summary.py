"""Writes what tools/gpu_checks.sh found: the GPU, the versions and the commit, and what each check says.

    python benchmarks/gpu_summary.py LOGS SUMMARY [COMMIT]

Exits with 1 where a check failed or could not run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness import environment, write_json


def last_line(log: Path) -> str:
    """Return the last words of a check, without the marks around them."""
    lines = [line.strip("= \n") for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main(arguments: list[str]) -> int:
    """Write the summary of the logs in a folder."""
    logs, summary, commit = Path(arguments[0]), Path(arguments[1]), arguments[2:3]
    checks: dict[str, dict[str, Any]] = {}
    for line in (logs / "checks.tsv").read_text().splitlines():
        name, status, seconds = line.split("\t")
        says = last_line(logs / f"{name}.txt")
        checks[name] = {"passed": status == "0", "seconds": int(seconds), "says": says}
    write_json(summary, {"environment": environment(*filter(None, commit)), "checks": checks})
    failed = [name for name, check in checks.items() if not check["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(checks)} checks passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
