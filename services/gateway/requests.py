"""`GET /v1/requests/{id}`: what became of a request, also of one that another gateway took, or that came over NATS."""

import msgspec
from aiohttp import web

from schemas.errors import JobNotFound
from schemas.job_report import JobReport, RequestReport, joined
from schemas.openai import MAX_PROMPTS
from schemas.state import JobState
from services.bus.connection import Bus
from services.bus.job_state import look
from services.gateway.request_names import RequestNames, prompt_job_id


class Requests:
    def __init__(self, bus: Bus, tenant: str, names: RequestNames) -> None:
        self._bus = bus
        self._tenant = tenant
        self._names = names

    async def show(self, request: web.Request) -> web.Response:
        """Raises `JobNotFound` or `BusUnavailable`."""
        name = request.match_info["id"]
        for job in self._names.job_ids(name):
            report = await self._report(name, job)
            if report is not None:
                return web.Response(body=msgspec.json.encode(report), content_type="application/json")
        raise JobNotFound(
            f"no request {name[:128]!r} is known: a job that came over NATS is not before a worker has it, "
            f"and all are forgotten {self._bus.settings.replies_max_age_s:g} s after their last event"
        )

    async def _report(self, name: str, job: str) -> JobReport | RequestReport | None:
        report = await look(self._bus, self._tenant, job)
        if report.state is not JobState.UNKNOWN:
            return report
        parts: list[JobReport] = []
        for prompt in range(MAX_PROMPTS):
            report = await look(self._bus, self._tenant, prompt_job_id(job, prompt))
            if report.state is JobState.UNKNOWN:
                break
            parts.append(report)
        return joined(name, parts) if parts else None
