"""What a store does beside the requests: on a thread that it is given, a bounded amount at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec

from kvstore.counters import StoreCounters

MAX_WAITING = 1024

P = ParamSpec("P")


class Backlog:
    """Thread-safe. What finds no room to wait is not done, and counted as `copies_dropped`."""

    def __init__(self, executor: Executor | None, counters: StoreCounters) -> None:
        self._executor = executor
        self._counters = counters
        self._lock = threading.Lock()
        self._num_waiting = 0

    @property
    def has_thread(self) -> bool:
        return self._executor is not None

    def add(self, work: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
        """Without a thread it is done at once."""
        if self._executor is None:
            work(*arguments, **options)
            return
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                self._counters.add(copies_dropped=1)
                return
            self._num_waiting += 1
        self._executor.submit(work, *arguments, **options).add_done_callback(self._done)

    def _done(self, _: Future[None]) -> None:
        with self._lock:
            self._num_waiting -= 1
