"""The step counter of a worker: as long as it moves, the worker's claims are renewed (DESIGN section 4, rule 3)."""

from services.bus.clock import elapsed_s

STALL_S = 10.0
STALL_STEPS = 10
_SMOOTHING = 0.1


class Progress:
    """Written by the thread that computes, read by the event loop; no lock is needed for single attributes.

    A worker calls `step` after each of its steps, and `rest` when it has nothing to compute.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._moved_s = elapsed_s()
        self._usual_s = 0.0
        self._resting = True

    def step(self) -> None:
        now = elapsed_s()
        if not self._resting:
            self._usual_s += _SMOOTHING * (now - self._moved_s - self._usual_s)
        self.steps += 1
        self._moved_s = now
        self._resting = False

    def rest(self) -> None:
        self._resting = True

    def begin(self) -> None:
        """Work was found: from now on the counter must move."""
        if self._resting:
            self._moved_s = elapsed_s()
            self._resting = False

    def stands_still(self) -> bool:
        """True if no step has ended for max(10 s, 10 usual steps) although there is work."""
        if self._resting:
            return False
        return elapsed_s() - self._moved_s > max(STALL_S, STALL_STEPS * self._usual_s)
