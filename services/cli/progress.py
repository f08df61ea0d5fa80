"""A line on the terminal that says how far a long command is; nothing where nobody watches."""

import sys
import time
from types import TracebackType

INTERVAL_S = 0.5


class Progress:
    """`tick` counts one; the line is gone at the end of the block."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._is_seen = sys.stderr.isatty()
        self._next_s = time.monotonic() + INTERVAL_S

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def tick(self) -> None:
        self._count += 1
        if self._is_seen and time.monotonic() >= self._next_s:
            self.say(f"{self._count:,} {self._what}")

    def say(self, text: str) -> None:
        """Replaces the line."""
        if self._is_seen:
            self._next_s = time.monotonic() + INTERVAL_S
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Before anything else is printed."""
        if self._is_seen:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
