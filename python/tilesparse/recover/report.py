"""Report of a reconstruction, and its warning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._reports import aligned, listed, warn_user


@dataclass(frozen=True)
class FittedSubmodule:
    """Fitted submodule, and its error on the held-out batches: ‖y - t‖² / ‖t‖² of its output and its target.

    `after` is that of the fitted weights, in the model's dtype. They are `kept` where it is below `before`.
    """

    name: str
    before: float
    after: float
    kept: bool


@dataclass(frozen=True)
class SkippedSubmodule:
    """Submodule that was left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ReconstructionReport:
    """Result of `reconstruct`; ``str()`` makes a table of it.

    `blocks` are the modules that were on the device one at a time; [""] is the whole model.
    """

    submodules: list[FittedSubmodule]
    skipped: list[SkippedSubmodule]
    blocks: list[str]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("submodule", "error before", "after", "")]
        for one in self.submodules:
            fate = "" if one.kept else "left as it was"
            rows.append((one.name, f"{one.before:.4f}", f"{one.after:.4f}", fate))
        lines = [line.rstrip() for line in aligned(rows)]
        return "\n".join([*lines, *(f"skipped {one.name}: {one.reason}" for one in self.skipped)])


def warn_of_skipped(skipped: Sequence[SkippedSubmodule]) -> None:
    """Warn of submodules that were not fitted, by reason."""
    reasons = dict.fromkeys(one.reason for one in skipped)
    texts = [
        f"{listed(one.name for one in skipped if one.reason == reason)} ({reason})" for reason in reasons
    ]
    if texts:
        warn_user(f"reconstruct did not fit {'; '.join(texts)}")
