"""The table of what choices of kernels cost; ``docs/tables.py`` writes it."""

from __future__ import annotations

from collections.abc import Mapping

from table_parts import document, table


def estimates() -> str:
    """Losses against the best kernel, by GPU and kind of product."""
    lines = []
    for gpu, found in document("estimates.json")["gpus"].items():
        lines.append(_line(f"{gpu}, all", found["all"], found.get("left_out")))
        if "unseen" in found:
            lines.append(_line(f"{gpu}, fitted to one run, other products of another", found["unseen"]))
        if len(found["kinds"]) > 1:
            lines += [_line(f"{gpu}, {kind}", one) for kind, one in found["kinds"].items()]
    return table(["", "cases", "chosen", "best of three", "layers left out"], lines)


def _line(what: str, found: Mapping[str, float], left_out: Mapping[str, float] | None = None) -> list[str]:
    chosen = _with_large(found)
    return [
        what,
        str(found["cases"]),
        chosen,
        f"{found['best_of_three']:.2%}",
        _with_large(left_out) if left_out else "",
    ]


def _with_large(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.2%} ({found['over_10']:.1%})"


ESTIMATE_TABLES = {"estimates": estimates}
