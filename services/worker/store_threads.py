"""Threads for a store's blocking calls, which a process that ends need not wait for.

`ThreadPoolExecutor` joins its threads when the interpreter exits: a store that hangs (a dead network mount, a frozen
disk) would hold the worker until somebody kills it. Nothing is lost with them: an unfinished block is a miss.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Call = tuple["Future[Any]", Callable[[], Any]]


class StoreThreads(Executor):
    def __init__(self, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"store-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        if self._closed:
            raise RuntimeError("the store's threads are closed")
        future: Future[T] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def close(self, timeout_s: float) -> bool:
        """Waits until all that was asked for is done; False if it was not within `timeout_s`, and never will be."""
        self._closed = True
        until_s = time.monotonic() + timeout_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        hung = sum(thread.is_alive() for thread in self._threads)
        if hung:
            log.warning("%d calls of the store hang and are left alone", hung)
        return not hung

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, run = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001 - whoever asked raises it again
                future.set_exception(error)
            del call, future, run  # an idle thread keeps no job alive
