"""How long somebody waits for a block. Who waits may give up at any moment; who reads it is woken and stops."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Patience:
    """For one read. Thread-safe."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._until_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._abort: Callable[[], None] | None = None

    @property
    def until_s(self) -> float:
        """By `time.monotonic`; in the past once it was given up."""
        return self._until_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    def give_up(self) -> None:
        """What is being read is of no use any more. Returns at once."""
        with self._lock:
            self._until_s = -math.inf
            if self._abort is not None:
                self._abort()

    @contextmanager
    def watched(self, abort: Callable[[], None]) -> Iterator[None]:
        """Calls `abort`, which must not block, if it is given up inside of the block, and never after it."""
        with self._lock:
            self._abort = abort
        try:
            yield
        finally:
            with self._lock:
                self._abort = None
