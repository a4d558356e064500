"""The line that a trainer prints for each logged step; it is all that a log file without a terminal gets."""

import sys
import time
from collections.abc import Mapping, Sequence

from tqdm.auto import tqdm


class Lines:
    """Prints step and total, the numbers to watch, and the time that is left.

    Args:
        unit: what is counted, such as step.
        watched: names of statistics, at most five.
        total: steps of the whole run; 0: unknown.
        done: steps before this process began.
    """

    def __init__(self, unit: str, watched: Sequence[str], *, total: int, done: int = 0) -> None:
        self.unit, self.watched, self.total, self._before = unit, watched, total, done
        self._started = time.monotonic()

    def show(self, done: int, numbers: Mapping[str, object], *, prefix: str = "") -> None:
        """Prints a line to stdout, above the bars that a terminal shows.

        Args:
            prefix: what the watched names begin with, such as `eval_`.
        """
        seconds = time.monotonic() - self._started
        tqdm.write(self.line(done, numbers, seconds=seconds, prefix=prefix), file=sys.stdout)
        sys.stdout.flush()

    def line(self, done: int, numbers: Mapping[str, object], *, seconds: float, prefix: str = "") -> str:
        """The line, `seconds` after this process began; without a watched number it has the first five others."""
        floats = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
        names = [prefix + name for name in self.watched if prefix + name in floats] or list(floats)[:5]
        parts = [f"{self.unit} {done}" + (f" of {self.total}" if self.total > 0 else "")]
        parts += [f"{name} {floats[name]:.4g}" for name in names]
        if self.total > done > self._before:
            parts.append(f"{clock_time(seconds / (done - self._before) * (self.total - done))} left")
        return " | ".join(parts)


def clock_time(seconds: float) -> str:
    """90 -> 0:01:30."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
