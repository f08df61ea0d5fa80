"""When threads that compute together only wait for one another: on cores that other processes use too.

A pass has some two hundred phases, and in each the slowest thread holds up all. One that has lost its core to another
process has it back after milliseconds, so that two threads took ten times as long as one on a busy machine. Bits do
not depend on threads: one computes alone then, and the others are tried again now and then.
"""

MAX_WAITED = 0.5  # of a pass, of all threads together: more than a second thread gains
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Crowd:
    """What one model's passes say of it. Times are of any clock that only goes forward, in seconds."""

    def __init__(self) -> None:
        self._late_in_a_row = 0
        self._alone_until_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def threads(self, wanted: int, now_s: float) -> int:
        """How many of `wanted` threads are worth while."""
        return 1 if now_s < self._alone_until_s else wanted

    def note(self, took_s: float, waited_s: float, now_s: float) -> None:
        """Of a pass of several threads, which has just ended: how long they waited for one another, together."""
        if waited_s <= MAX_WAITED * took_s:
            self._late_in_a_row, self._pause_s = 0, FIRST_PAUSE_S
            return
        self._late_in_a_row += 1
        if self._late_in_a_row > 1:  # once is a hiccup
            self._alone_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
