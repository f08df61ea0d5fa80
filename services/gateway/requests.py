"""`/v1/requests/{id}`: what became of a request, its answer, and its end, for who comes back for them.

Also of one that another gateway took, or that came over NATS; of those only the state, since they have no answer in
OpenAI's shape.
"""

import asyncio
from typing import cast

import msgspec
from aiohttp import web

from schemas.errors import Cancelled, InvalidRequest, JobNotFound
from schemas.job_report import JobReport, RequestReport
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.gateway.answering import stream_answer, whole_answer
from services.gateway.connection import ClientConnection
from services.gateway.envelope import TENANT
from services.gateway.event_stream import EventStream
from services.gateway.exchange import Exchange
from services.gateway.inbox import Inbox
from services.gateway.recall import Recalled, recall
from services.gateway.refusal import accepted
from services.gateway.request_report import find_request
from services.openai.request_names import RequestNames
from services.openai.route import ROUTES, answer_to
from services.openai.token_names import TokenNames
from services.settings import Api

LAST_EVENT_ID_HEADER = "Last-Event-ID"
MAX_WAIT_S = 60.0
RETRY_MS = 1000  # browsers would wait 3 to 5 s, and in 5 s a job that nobody reads has ended


class Requests:
    """`names`: how the tokens of each model that is served here are spelled."""

    def __init__(
        self, api: Api, bus: Bus, exchange: Exchange, requests: RequestNames, names: dict[str, TokenNames]
    ) -> None:
        self._api = api
        self._bus = bus
        self._exchange = exchange
        self._requests = requests
        self._names = names

    async def show(self, request: web.Request) -> web.Response:
        """Raises `JobNotFound` or `BusUnavailable`."""
        return web.Response(body=msgspec.json.encode(await self._report(request)), content_type="application/json")

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends what has not ended, and tells how it is then. Raises `JobNotFound` or `BusUnavailable`."""
        report = await self._report(request)
        jobs = report.jobs if isinstance(report, RequestReport) else [report]
        for job in jobs:
            await cancel_job(self._bus, request[TENANT], job.id, Cancelled("the request was cancelled by its client"))
        return await self.show(request)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The answer as a stream, from `Last-Event-ID` on; 204 for who has got all of it, so that a browser's
        EventSource does not come again. Raises `JobNotFound`, `InvalidRequest` or `BusUnavailable`."""
        last_event_id = request.headers.get(LAST_EVENT_ID_HEADER, request.query.get("last_event_id", ""))
        found = await self._recall(request)
        answer = answer_to(found.asked, found.model, self._names[found.model], last_event_id)
        if answer.is_told:
            return web.Response(status=204)
        inbox = Inbox()
        connection = cast(ClientConnection, request.protocol)
        with connection.attended(inbox.leave, self._api.stream_buffer_bytes, self._api.write_timeout_s):
            async with self._exchange.joined(found, inbox):
                stream = EventStream(request, connection, retry_ms=RETRY_MS)
                return await stream_answer(stream, inbox, answer, self._api.keepalive_s)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The whole answer; 202 if it is not complete within `wait_s`. Raises what the request ended with."""
        wait_s = _wait_s(request)
        found = await self._recall(request)
        answer = answer_to(found.asked, found.model, self._names[found.model])
        inbox = Inbox()
        connection = cast(ClientConnection, request.protocol)
        with connection.attended(inbox.leave, self._api.stream_buffer_bytes, self._api.write_timeout_s):
            report = await self._report(request)
            if not report.state.is_end and not wait_s:
                return accepted(answer.head.id, report.state)
            async with self._exchange.joined(found, inbox):
                try:
                    async with asyncio.timeout(None if report.state.is_end else wait_s):
                        return await whole_answer(inbox, answer)
                except TimeoutError:
                    return accepted(answer.head.id, report.state)

    async def _report(self, request: web.Request) -> JobReport | RequestReport:
        name = request.match_info["id"]
        tenant = request[TENANT]
        report = await find_request(self._bus, tenant, name, self._requests.job_ids(tenant, name))
        if report is None:
            raise JobNotFound(
                f"no request {name[:128]!r} is known: a job that came over NATS is not before a worker has it, "
                f"and all are forgotten {self._bus.settings.replies_max_age_s:g} s after their last event"
            )
        return report

    async def _recall(self, request: web.Request) -> Recalled:
        name = request.match_info["id"]
        tenant = request[TENANT]
        found = await recall(self._bus, tenant, self._requests.job_ids(tenant, name))
        if found is None or found.asked.route not in ROUTES or found.model not in self._names:
            raise JobNotFound(f"no request {name[:128]!r} that has an answer here is known")
        return found


def _wait_s(request: web.Request) -> float:
    given = request.query.get("wait_s", "0")
    try:
        wait_s = float(given)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise InvalidRequest(f"wait_s must be 0 to {MAX_WAIT_S:g} seconds", param="wait_s")
    return wait_s
