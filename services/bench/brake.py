"""Makes another process slower, by stopping it again and again."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def slowed(pid: int, every_s: float, by_s: float) -> Iterator[None]:
    """Of each `every_s` that the process runs it takes `by_s` more: a step of that length is slowed by so much."""
    over = threading.Event()

    def brake() -> None:
        while not over.wait(every_s):
            os.kill(pid, signal.SIGSTOP)
            try:
                over.wait(by_s)
            finally:
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=brake, name="brake")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
