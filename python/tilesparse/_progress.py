"""How far a long task is, on stderr."""

import sys
import time

SECONDS = 5.0  # between two lines


class Progress:
    """A line every few seconds, so that logs show it too, or a bar on a terminal."""

    def __init__(self, total: int, *, bar: bool = False) -> None:
        self._total, self._bar = total, bar
        self._said = time.monotonic()

    def show(self, done: int, text: str) -> None:
        """Says that `done` of all steps are done, and `text` about them, if it is time to."""
        if self._bar:
            bar = ("#" * (30 * done // self._total)).ljust(30, ".")
            end = "\n" if done == self._total else ""
            print(f"\r[{bar}] {done}/{self._total}  {text}", end=end, file=sys.stderr, flush=True)
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            print(f"{done}/{self._total}  {text}", file=sys.stderr, flush=True)
