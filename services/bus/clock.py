"""Time that a wrong or stepping wall clock cannot bend."""

import time
from datetime import datetime

# Boot time also counts while a laptop sleeps, which the broker does not wait for; monotonic time would not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Seconds since an arbitrary start, never stepping, going on through SIGSTOP and suspend."""
    return time.clock_gettime(_CLOCK)


def until_next_s(period_s: float) -> float:
    """How long to sleep until the clock reaches a multiple of `period_s`, and never just a moment.

    Timers that sleep like this wake together, those of other processes on the host too: an idle pipeline's machine is
    woken once a period instead of once a timer, and what was sent at the same moment is read in one go.
    """
    left_s = period_s - elapsed_s() % period_s
    return left_s if left_s > period_s / 10 else left_s + period_s


def parse_timestamp(text: str) -> float:
    """Unix seconds of the broker's RFC 3339 timestamps (nanoseconds are cut to microseconds)."""
    return datetime.fromisoformat(text).timestamp()


DRIFT = 1e-4  # seconds a second that two clocks may drift apart, generously


class BrokerClock:
    """The broker's clock, carried forward by `elapsed_s` from the answer that showed it best."""

    def __init__(self) -> None:
        self._offset_s = time.time() - elapsed_s()
        self._error_s = float("inf")
        self._set_s = elapsed_s()

    @property
    def synced(self) -> bool:
        return self._error_s < float("inf")

    def set(self, broker_s: float, asked_s: float, answered_s: float) -> None:
        """`asked_s` and `answered_s` are `elapsed_s` around the request that brought `broker_s`.

        A slow answer says less than a quick one of some time ago.
        """
        error_s = (answered_s - asked_s) / 2
        if error_s <= self._error_s + DRIFT * (answered_s - self._set_s):
            self._offset_s = broker_s - (asked_s + answered_s) / 2
            self._error_s, self._set_s = error_s, answered_s

    def now(self) -> float:
        """Unix seconds by the broker; by the local clock until the first answer."""
        return elapsed_s() + self._offset_s
