"""Warnings that cannot flood a log: trouble with a store comes once a block, thousands of times a minute."""

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 60.0


class ThrottledLog:
    """At most one warning of each kind a minute; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        now = self._clock()
        with self._lock:
            if now < self._next.get(kind, now):
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._next[kind] = now + INTERVAL_S
            left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out} more of this kind since the last warning)" if left_out else ""
        self._logger.warning("kv store: %s: %s%s", kind, message, more)
