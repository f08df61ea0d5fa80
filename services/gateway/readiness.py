"""Whether a request could be answered now, and if not, what is missing."""

from typing import TypedDict

import msgspec

from schemas.beat import BEAT_INTERVAL_S, WORKER_ROLES, Beat, ProcessRole, ProcessState
from schemas.errors import BusUnavailable, NoWorker
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.gateway.catalog import Catalog

_TAKES_JOBS = ("ok", "degraded")
_STAGES: tuple[ProcessRole, ...] = ("prefill", "decode")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /ready, with status 200 for `ok` and `degraded`."""

    state: ProcessState
    reasons: list[str]
    workers: dict[str, dict[str, int]]  # role -> state -> number of processes

    @property
    def is_ready(self) -> bool:
        return self.state in _TAKES_JOBS


class Health(TypedDict):
    """Body of /health. The last three are the report's."""

    status: str
    process: str
    uptime_s: float
    models: list[str]
    open_requests: int
    state: ProcessState
    reasons: list[str]
    workers: dict[str, dict[str, int]]


class Readiness:
    def __init__(self, bus: Bus, beats: BeatTable, catalog: Catalog, *, has_fallback: bool = False) -> None:
        """`has_fallback`: somebody else answers what cannot be answered here."""
        self._bus = bus
        self._beats = beats
        self._catalog = catalog
        self._has_fallback = has_fallback
        self.draining = False

    def report(self) -> Report:
        """`warming` until a prefill and a decode worker of one build of each model take jobs; `degraded` if somebody
        else answers meanwhile."""
        missing, worn = self._missing(), self._worn()
        state: ProcessState = "ok"
        if missing and not self._has_fallback:
            state = "warming"
        elif missing or worn:
            state = "degraded"
        if self.draining:
            state, missing = "draining", ["the gateway is shutting down", *missing]
        return Report(state=state, reasons=[*missing, *worn], workers=self._workers())

    async def check(self, slug: str, timeout_s: float) -> None:
        """Waits up to `timeout_s` for workers of the model. Raises `NoWorker` or `BusUnavailable`.

        Who has only just begun to listen waits for one round of beats first: nobody can have been heard yet.
        """
        if self.draining:
            raise NoWorker("the gateway is shutting down: try again")
        if not self._bus.connected:
            raise BusUnavailable("the gateway has no connection to NATS: try again later")
        patience_s = max(timeout_s, 1.5 * BEAT_INTERVAL_S - self._beats.listening_s)
        if not await self._beats.wait_for(lambda _: self._missing_role(slug) is None, patience_s):
            raise NoWorker(f"no {self._missing_role(slug)} worker of {slug} is running: try again later")

    def takes(self, slug: str) -> bool:
        """Whether a request for the model would be taken at once."""
        return not self.draining and self._bus.connected and self._missing_role(slug) is None

    def can_end(self, slug: str, build: str, has_token: bool) -> bool:
        """Whether workers live, in whatever state, that can end a job which `build` ("": nobody yet) has begun.

        Decode workers of that build can do all of it, once a prefill worker of any build has passed it on. True while
        the bus is away: nothing is heard then, and nothing could be ended either.
        """
        if not self._bus.connected:
            return True
        live = self._live(slug)
        is_read = has_token or any(beat.plays("prefill") for beat in live)
        return is_read and any(beat.plays("decode") and build in ("", beat.build) for beat in live)

    def _live(self, slug: str) -> list[Beat]:
        return [beat for beat in self._beats.alive() if beat.model == slug and beat.role in WORKER_ROLES]

    def _missing_role(self, slug: str) -> str | None:
        """The kind of worker that no build of the model can do without, None if one build has both."""
        takers = [beat for beat in self._live(slug) if beat.state in _TAKES_JOBS]
        builds = {role: {beat.build for beat in takers if beat.plays(role)} for role in _STAGES}
        if builds["prefill"] & builds["decode"]:
            return None
        return next((role for role in _STAGES if not builds[role]), "decode")

    def _missing(self) -> list[str]:
        if not self._bus.connected:
            return ["no connection to NATS"]
        found = ((slug, self._missing_role(slug)) for slug in self._catalog.models)
        return [f"no {role} worker of {slug}" for slug, role in found if role is not None]

    def _worn(self) -> list[str]:
        """What live workers complain of."""
        return [
            f"{beat.process}: {', '.join(beat.reasons) or beat.state}"
            for beat in self._beats.alive()
            if beat.role in WORKER_ROLES and beat.state == "degraded"
        ]

    def _workers(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {role: {} for role in _STAGES}
        for beat in self._beats.alive():
            states = found.setdefault(beat.role, {})
            states[beat.state] = states.get(beat.state, 0) + 1
        return found
