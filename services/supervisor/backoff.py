"""When to start a dead process again, and when to give up on it (decision 0013)."""

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
STABLE_S = 15.0  # who lived this long had no trouble starting
MAX_FAILED_STARTS = 5
MAX_KILLED = 20
SETUP_EXIT_CODE = 2  # of our own command: wrong settings do not heal


class Backoff:
    """Counts the deaths of one process in a row, until it lives for `STABLE_S`.

    Exits of its own count towards `MAX_FAILED_STARTS`; being killed, by a person or for memory, is borne longer. So is
    exit code 2 of a process that has worked before: its settings are the same, but its broker is away. Exit code 0 is
    no trouble: it was told to go (`kvrelay drain`), and the next one is wanted at once.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.killed = 0
        self.has_worked = False

    def died(self, exit_code: int, lived_s: float) -> float | None:
        """Seconds to wait before the next start, or None: give up. `exit_code` is negative for a signal."""
        if lived_s >= STABLE_S:
            self.failed = self.killed = 0
            self.has_worked = True
        if exit_code == 0:
            return FIRST_DELAY_S
        if exit_code == SETUP_EXIT_CODE and not self.has_worked:
            return None
        if exit_code < 0 or exit_code == SETUP_EXIT_CODE:
            self.killed += 1
        else:
            self.failed += 1
        if self.failed >= MAX_FAILED_STARTS or self.killed >= MAX_KILLED:
            return None
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failed + self.killed - 1))
