"""Progress and messages on stderr.

Messages go through the logger "tilesparse", so a program can silence or redirect them. It writes to stderr by
default: long steps say how far they are without being asked.
"""

import logging
import sys
import time

from tqdm import tqdm

SECONDS = 5.0  # between two lines, and before a bar appears

logger = logging.getLogger("tilesparse")


class _Stderr(logging.Handler):
    """Write messages as lines on what is stderr at that moment, above a bar that is shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


logger.addHandler(_Stderr())
logger.setLevel(logging.INFO)
logger.propagate = False  # handlers of the program would write each line again


class Progress:
    """A bar on a terminal, and a message every few seconds elsewhere, so that logs stay readable."""

    def __init__(self, total: int) -> None:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=total, delay=SECONDS, file=sys.stderr) if on_terminal else None
        self._total, self._skipped = total, 0
        self._said = self._began = time.monotonic()

    def skip(self, done: int) -> None:
        """Count steps that an earlier run did; they do not tell how long the others take."""
        self._skipped += done
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.initial += done
            self._bar.n += done
            self._bar.unpause()

    def show(self, done: int, text: str) -> None:
        """Show that ``done`` of all steps are done, with ``text`` about them."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= self._total:
                self._bar.close()
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            logger.info("%d/%d  %s%s", done, self._total, text, self._left(done))

    def _left(self, done: int) -> str:
        """Estimate the time left from the steps of this run; return nothing at the end."""
        here = done - self._skipped
        if here < 1 or done >= self._total:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - done) / here
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Round a time for reading: "12 s", "3 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
