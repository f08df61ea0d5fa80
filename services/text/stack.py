"""Calls on a stack of a size of their own: what recurses over a caller's input needs a known one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

DEEP = 32 << 20  # bytes: for what was tried out on less, see `services.text.grammar_check`

_size = threading.Lock()  # the size is the whole process's, for threads that begin


def on_stack(num_bytes: int, call: Callable[[], T]) -> T:
    """`call()` on a thread of its own with so much stack, waited for."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stack") as thread:
        with _size:
            before = threading.stack_size(num_bytes)
            try:
                done = thread.submit(call)
            finally:
                threading.stack_size(before)
        return done.result()
