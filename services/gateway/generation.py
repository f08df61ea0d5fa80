"""The life of one generating request, from its body to the end of its answer."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
from aiohttp import web

from schemas.asked import Asked
from schemas.job import Job, job_digest
from schemas.openai import ChatRequest, CompletionRequest
from services import telemetry
from services.bus.connection import Bus
from services.gateway.answering import stream_answer, whole_answer
from services.gateway.body import read_body
from services.gateway.catalog import Catalog
from services.gateway.connection import ClientConnection
from services.gateway.envelope import LOG_FIELDS, REQUEST_ID, REQUEST_KEY
from services.gateway.event_stream import EventStream
from services.gateway.exchange import Exchange, Order
from services.gateway.inbox import Inbox
from services.gateway.readiness import Readiness
from services.gateway.recall import newest_try
from services.gateway.refusal import accepted
from services.gateway.wishes import Wishes
from services.openai.answer import Answer
from services.openai.intake import echoes_of, jobs_of
from services.openai.request_names import RequestNames, job_id
from services.openai.route import CHAT, COMPLETIONS, Route, answer_to
from services.openai.token_names import TokenNames
from services.settings import Api
from services.text.model import TextModel


class Call(NamedTuple):
    """A request as far as it is known before the bus hears of it; its jobs carry the ids of a first try."""

    route: Route
    asked: ChatRequest | CompletionRequest
    wishes: Wishes
    text: TextModel
    jobs: list[Job]


class Generation:
    def __init__(
        self,
        api: Api,
        catalog: Catalog,
        readiness: Readiness,
        exchange: Exchange,
        requests: RequestNames,
        bus: Bus,
        names: dict[str, TokenNames],
    ) -> None:
        self._api = api
        self._catalog = catalog
        self._readiness = readiness
        self._exchange = exchange
        self._requests = requests
        self._bus = bus
        self._names = names
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, COMPLETIONS)

    async def _generate(self, request: web.Request, route: Route) -> web.StreamResponse:
        """Raises `KvrelayError` for whatever goes wrong before the head of the answer is sent."""
        self.num_open += 1
        self.idle.clear()
        try:
            return await self._answered(request, route)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()

    async def _answered(self, request: web.Request, route: Route) -> web.StreamResponse:
        inbox = Inbox()
        connection = cast(ClientConnection, request.protocol)
        with (
            telemetry.span("gateway", telemetry.extract(request.headers)),
            connection.attended(inbox.leave, self._api.stream_buffer_bytes, self._api.write_timeout_s),
        ):
            call = await self._read(request, route)
            orders, again = await self._orders(call, request[REQUEST_KEY])
            if not again:
                await self._readiness.check(call.text.slug, self._api.no_worker_timeout_s)
            answer = answer_to(orders[0].asked, call.text.slug, self._names[call.text.slug])
            self._note(request, call, orders[0].asked, answer)
            async with self._exchange.opened(orders, inbox, again=bool(call.wishes.idempotency_key)):
                if call.wishes.detached:
                    return accepted(answer.head.id)
                if call.asked.stream:
                    stream = EventStream(request, connection, f"/v1/requests/{answer.head.id}/events")
                    return await stream_answer(stream, inbox, answer, self._api.keepalive_s)
                return await whole_answer(inbox, answer)

    async def _read(self, request: web.Request, route: Route) -> Call:
        """Everything that can be refused without the bus is refused here."""
        wishes = Wishes.of(request)
        asked = route.parse(await read_body(request, self._api.max_body_bytes), strict=self._api.strict)
        text = self._catalog.find(asked.model)
        if wishes.idempotency_key:
            request[REQUEST_KEY] = wishes.request_key
        with telemetry.span("gateway.tokenise"):
            owner = None if wishes.detached else self._exchange.owner
            jobs = await jobs_of(asked, text, request[REQUEST_KEY], owner)
        return Call(route, asked, wishes, text, jobs)

    async def _orders(self, call: Call, key: str) -> tuple[list[Order], bool]:
        """The jobs to publish, and whether they may have been published before."""
        again = False
        if call.wishes.idempotency_key:
            key, again = await newest_try(self._bus, self._bus.settings.tenant, key, len(call.jobs))
        first = Asked(
            key=key,
            route=call.route.name,
            created=int(self._bus.now()),
            num_prompts=len(call.jobs),
            n=call.asked.n or 1,
            logprobs=call.asked.num_logprobs is not None,
            include_usage=call.asked.include_usage,
            include_metrics=bool(call.asked.include_metrics),
            tools=call.asked.has_tools,
            detached=call.wishes.detached,
            timeout_s=call.asked.timeout_s,
            ttft_timeout_s=call.asked.ttft_timeout_s,
        )
        returns = bool(call.asked.stream or call.wishes.idempotency_key)
        echoes = echoes_of(call.asked, call.jobs, call.text)
        return [
            Order(job, msgspec.structs.replace(first, digest=job_digest(job), echo=echo), returns)
            for job, echo in zip(_renamed(call.jobs, key), echoes, strict=True)
        ], again

    def _note(self, request: web.Request, call: Call, asked: Asked, answer: Answer) -> None:
        request[LOG_FIELDS].update(answer=answer.head.id, model=call.text.slug, stream=bool(call.asked.stream))
        request[REQUEST_KEY] = asked.key
        if request[REQUEST_ID]:
            self._requests.remember(request[REQUEST_ID], asked.key)


def _renamed(jobs: Sequence[Job], key: str) -> list[Job]:
    return [msgspec.structs.replace(job, id=job_id(key, prompt, len(jobs))) for prompt, job in enumerate(jobs)]
