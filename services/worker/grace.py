"""The time that a worker has to leave: shared out between its steps, and enforced whatever hangs.

Where nobody takes over at once, jobs may end by themselves first; then they are handed back; the rest is for closing.
"""

import logging
import os
import sys
import threading
import time

FINISH_SHARE = 0.7
HAND_BACK_SHARE = 0.9  # what is not handed back by then comes back to its queue by itself, after ack_wait
MIN_LIMIT_S = 1.0  # closing takes a moment even when no grace is given

log = logging.getLogger(__name__)


class Grace:
    """Begins when it is made."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._began_s = time.monotonic()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    def left_s(self, share: float) -> float:
        """Seconds until `share` of the grace is over, 0 from then on."""
        return max(0.0, share * self._grace_s - self.passed_s)


class Curfew:
    """Ends the process when the grace is over. What hangs then (a store, a broker, a collector) holds no job: their
    messages come back by themselves."""

    def __init__(self, grace_s: float) -> None:
        self._timer = threading.Timer(max(grace_s, MIN_LIMIT_S), self._time_is_up)
        self._timer.daemon = True
        self._begun = False

    def begin(self) -> None:
        """Twice is once."""
        if not self._begun:
            self._begun = True
            self._timer.start()

    def _time_is_up(self) -> None:
        log.warning("the grace is over, something hangs or is slow: leaving it")
        os._exit(0)


def leave_hanging_threads() -> None:
    """Ends the process at once, with exit code 0, if a thread is left that the interpreter would wait for."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
