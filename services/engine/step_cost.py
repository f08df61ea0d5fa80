"""What a row more costs a small pass, as measured of late: seconds = of a pass + rows * of a row."""

MAX_ROWS = 96  # of a small pass: larger ones are bound by arithmetic, and their rows cost less each
_MEMORY = 0.97  # of what was measured, a pass later
_MAX_SURPRISE = 3.0  # times what was expected: more says something of the machine, not of the pass
_FIRST_SHARE = 0.25  # of a pass of one row, what a second one is taken to cost while nothing says otherwise
_MIN_SPREAD = 0.1  # variance of the rows below which they say nothing of the slope


class StepCost:
    """A weighted least-squares line. Written by the model's thread, read by the event loop's: of two numbers that do
    not quite belong together comes a plan that is a little worse, never another token."""

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._seconds = self._products = 0.0
        self._row_s = 0.0  # 0: unknown
        self._pass_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def row_s(self) -> float:
        """Of one row more. Only where `is_known`."""
        return self._row_s

    def seconds(self, rows: float) -> float:
        """Of a pass of `rows`. Only where `is_known`."""
        return self._pass_s + rows * self._row_s

    def note(self, rows: int, seconds: float) -> None:
        if rows > MAX_ROWS:
            return
        if self.is_known:
            seconds = min(seconds, _MAX_SURPRISE * self.seconds(rows))
        self._weight = _MEMORY * self._weight + 1
        self._rows = _MEMORY * self._rows + rows
        self._squares = _MEMORY * self._squares + rows * rows
        self._seconds = _MEMORY * self._seconds + seconds
        self._products = _MEMORY * self._products + rows * seconds
        self._fit()

    def _fit(self) -> None:
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - rows * rows
        if spread > _MIN_SPREAD:
            slope = (self._products / self._weight - rows * seconds) / spread
            self._row_s = min(max(slope, 0.01 * seconds / rows), seconds / rows)
        elif self._row_s == 0.0:
            self._row_s = _FIRST_SHARE * seconds / (1 + _FIRST_SHARE * (rows - 1))
        self._row_s = min(self._row_s, seconds / rows)
        self._pass_s = seconds - rows * self._row_s
