"""The other side's answer to a request that was answered: compared, told in the log, counted, and thrown away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services import telemetry
from services.openai.observed import Observed

MAX_MIRRORED = 16  # at once; more are counted as skipped

_log = logging.getLogger("kvrelay.mirror")


class Mirrored:
    """One request on both sides. `answered` is what its client got, `ended` is called once that is known.

    `sides`: the names of the side that answers and of the other one.
    """

    def __init__(self, request: str, sides: tuple[str, str], other: Awaitable[Observed] | None) -> None:
        self.answered = Observed()
        self._request = request
        self._sides = sides
        self._over = asyncio.Event()
        self._other = asyncio.ensure_future(other) if other is not None else None

    def end(self, error: str = "") -> None:
        """Of the answer; twice is once."""
        if not self._over.is_set():
            self.answered.end(error)
            self._over.set()

    async def compare(self) -> None:
        if self._other is None:
            telemetry.mirrored.add(outcome="skipped")
            return
        try:
            await self._over.wait()
            if self.answered.error:  # its client left, or it failed: there is nothing to compare with
                telemetry.mirrored.add(outcome="skipped")
                return
            self._tell(await self._other)
        finally:
            self._other.cancel()
            await asyncio.gather(self._other, return_exceptions=True)

    def _tell(self, other: Observed) -> None:
        parted = None if other.error else self.answered.difference(other)
        outcome = "failed" if other.error else "same" if parted is None else "different"
        telemetry.mirrored.add(outcome=outcome)
        fields: dict[str, object] = {"request": self._request, "outcome": outcome}
        if other.error:
            fields["error"] = other.error
        if parted is not None:
            fields["choice"], fields["differs_at"] = parted
        for side, observed in zip(self._sides, (self.answered, other), strict=True):
            fields |= _told(side, observed)
            if not observed.error:
                telemetry.mirror_total_s.record(observed.total_s, side=side)
                if observed.first_s is not None:
                    telemetry.mirror_ttft_s.record(observed.first_s, side=side)
        _log.info("mirrored", extra={"fields": fields})


def _told(side: str, observed: Observed) -> dict[str, object]:
    """Never the text itself: it is somebody's."""
    told: dict[str, object] = {
        f"{side}_s": round(observed.total_s, 6),
        f"{side}_ttft_s": None if observed.first_s is None else round(observed.first_s, 6),
        f"{side}_chars": sum(map(len, observed.texts.values())),
        f"{side}_tokens": observed.num_tokens,
        f"{side}_reasons": ",".join(reason for _, reason in sorted(observed.reasons.items())),
    }
    return {name: value for name, value in told.items() if value is not None}


class Mirrors:
    """All that run; `close` ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: str, sides: tuple[str, str], other: Callable[[], Awaitable[Observed]]) -> Mirrored:
        """`other` asks the other side."""
        has_room = len(self._tasks) < MAX_MIRRORED
        mirrored = Mirrored(request, sides, other() if has_room else None)
        task = asyncio.create_task(mirrored.compare(), name=f"mirror of {request}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return mirrored

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
