"""`GET /v1/stats`: the pipeline at a glance, from beats, the broker's queues and the meters in the beats."""

import time

import msgspec
from aiohttp import web

from schemas.beat import SILENT_AFTER_S, WORKER_ROLES, Beat
from schemas.meter import Buckets, percentiles_s
from schemas.stats import GatewayStats, Spread, Stats, WorkerStats, WorkStats
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.gateway.catalog import Catalog
from services.gateway.generation import Generation
from services.gateway.meters import RATE_WINDOW_S, WINDOW_S, Meters
from services.gateway.queues import Queues
from services.gateway.readiness import Readiness

MISSED_FOR_S = 60.0  # a worker that fell silent is shown for so long
_SHARES = (0.5, 0.9, 0.99)


class StatsRoute:
    def __init__(
        self, bus: Bus, beats: BeatTable, catalog: Catalog, readiness: Readiness, generation: Generation
    ) -> None:
        self._bus = bus
        self._beats = beats
        self._catalog = catalog
        self._readiness = readiness
        self._generation = generation
        self._queues = Queues(bus, self._builds)
        self.meters = Meters(beats)
        self._started_s = time.monotonic()

    async def show(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(await self._stats())
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stats(self) -> Stats:
        queues = await self._queues.look()
        workers = [_worker(beat, age_s) for beat, age_s in self._heard()]
        return Stats(
            at=round(self._bus.now(), 3),
            connected=self._bus.connected,
            gateway=self._gateway(),
            queues=queues,
            workers=sorted(workers, key=lambda worker: (worker.role != "prefill", worker.role, worker.process)),
            work=self._work(),
        )

    def _heard(self) -> list[tuple[Beat, float]]:
        """Workers, with the age of what they said: those that live, and those that are missed."""
        return [
            (beat, age_s)
            for beat, age_s in self._beats.remembered()
            if beat.role in WORKER_ROLES and beat.state != "stopped" and age_s <= MISSED_FOR_S
        ]

    def _builds(self) -> set[tuple[str, str]]:
        served = {(model, "") for model in self._catalog.models}
        return served | {(beat.model, beat.build) for beat, _ in self._heard() if beat.model in self._catalog.models}

    def _gateway(self) -> GatewayStats:
        report = self._readiness.report()
        return GatewayStats(
            process=self._bus.name,
            state=report.state,
            reasons=report.reasons,
            models=list(self._catalog.models),
            open_requests=self._generation.num_open,
            uptime_s=round(time.monotonic() - self._started_s, 3),
        )

    def _work(self) -> WorkStats:
        lately, window_s = self.meters.grown(WINDOW_S)
        now, rate_window_s = self.meters.grown(RATE_WINDOW_S)
        ages = [age_s for _, age_s in self._heard() if age_s <= SILENT_AFTER_S]
        per_s = 1.0 / rate_window_s if rate_window_s else 0.0
        return WorkStats(
            age_s=round(max(ages), 3) if ages else None,
            window_s=round(window_s, 1),
            prefix_asked_tokens=lately.asked_tokens,
            prefix_hit_tokens=lately.hit_tokens,
            ttft=_spread(lately.ttft),
            itl=_spread(lately.itl),
            rate_window_s=round(rate_window_s, 1),
            prompt_tokens_per_s=round(now.prompt_tokens * per_s, 1),
            generated_tokens_per_s=round(now.generated_tokens * per_s, 1),
        )


def _worker(beat: Beat, age_s: float) -> WorkerStats:
    return WorkerStats(
        process=beat.process,
        role=beat.role,
        state="silent" if age_s > SILENT_AFTER_S else beat.state,
        reasons=beat.reasons,
        model=beat.model,
        build=beat.build,
        running=beat.running,
        capacity=beat.capacity,
        host=beat.host,
        pid=beat.pid,
        uptime_s=beat.uptime_s,
        age_s=round(age_s, 3),
    )


def _spread(buckets: Buckets) -> Spread:
    p50, p90, p99 = (None if value is None else round(1000 * value, 2) for value in percentiles_s(buckets, _SHARES))
    return Spread(count=sum(buckets.values()), p50_ms=p50, p90_ms=p90, p99_ms=p99)
