"""`GET /v1/requests/{id}`: what became of a request, also of one that another gateway took, or that came over NATS."""

import msgspec
from aiohttp import web

from schemas.errors import JobNotFound
from services.bus.connection import Bus
from services.gateway.request_report import find_request
from services.openai.request_names import RequestNames


class Requests:
    def __init__(self, bus: Bus, tenant: str, names: RequestNames) -> None:
        self._bus = bus
        self._tenant = tenant
        self._names = names

    async def show(self, request: web.Request) -> web.Response:
        """Raises `JobNotFound` or `BusUnavailable`."""
        name = request.match_info["id"]
        report = await find_request(self._bus, self._tenant, name, self._names.job_ids(name))
        if report is None:
            raise JobNotFound(
                f"no request {name[:128]!r} is known: a job that came over NATS is not before a worker has it, "
                f"and all are forgotten {self._bus.settings.replies_max_age_s:g} s after their last event"
            )
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")
