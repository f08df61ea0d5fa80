"""A measured rate, which follows what the machine does now."""

_WEIGHT = 0.2  # of the newest measurement


class Rate:
    def __init__(self) -> None:
        self.per_s = 0.0  # 0: nothing was measured yet

    def note(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            now = amount / seconds
            self.per_s = now if self.per_s == 0.0 else (1 - _WEIGHT) * self.per_s + _WEIGHT * now

    def seconds_for(self, amount: float, unknown: float) -> float:
        """How long `amount` takes; `unknown` while nothing was measured."""
        return amount / self.per_s if self.per_s else unknown
