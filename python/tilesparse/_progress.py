"""How far a long task is, and how long it will take, on stderr."""

import sys
import time

SECONDS = 5.0  # between two lines


class Progress:
    """A line every few seconds, so that logs show it too, or a bar on a terminal."""

    def __init__(self, total: int, *, bar: bool = False) -> None:
        self._total, self._bar = total, bar
        self._said = self._began = time.monotonic()
        self._found = 0

    def skip(self, done: int) -> None:
        """Notes that so many steps were done before, which tell nothing of how long the others take."""
        self._found += done
        self._began = time.monotonic()

    def show(self, done: int, text: str) -> None:
        """Says that `done` of all steps are done, and `text` about them, if it is time to."""
        if self._bar:
            bar = ("#" * (30 * done // self._total)).ljust(30, ".")
            end = "\n" if done == self._total else ""
            line = f"\r[{bar}] {done}/{self._total}  {text}{self._left(done)}"
            print(
                f"{line}\033[K", end=end, file=sys.stderr, flush=True
            )  # which clears what a longer one left
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            print(f"{done}/{self._total}  {text}{self._left(done)}", file=sys.stderr, flush=True)

    def _left(self, done: int) -> str:
        """The time that is left if the other steps take as long as those of now; nothing at the end."""
        here = done - self._found
        if here < 1 or done >= self._total:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - done) / here
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Rounded to what is worth saying: "12 s", "3 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
