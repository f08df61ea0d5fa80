"""The life of one generating request, from its body to the end of its answer."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import web

from schemas.asked import Asked
from schemas.errors import KvrelayError
from schemas.job import Job, job_digest
from schemas.openai import ChatRequest, CompletionRequest
from services import telemetry
from services.bus.connection import Bus
from services.gateway.answering import stream_answer, whole_answer
from services.gateway.body import read_body
from services.gateway.catalog import Catalog
from services.gateway.connection import ClientConnection
from services.gateway.envelope import LOG_FIELDS, REQUEST_ID, REQUEST_KEY, TENANT
from services.gateway.event_stream import EventStream
from services.gateway.exchange import Exchange, Order
from services.gateway.inbox import Ended, Inbox
from services.gateway.readiness import Readiness
from services.gateway.recall import newest_try
from services.gateway.refusal import accepted
from services.gateway.sides import Sides
from services.gateway.tgi import in_tgi_shape
from services.gateway.wishes import Wishes
from services.openai.answer import Answer
from services.openai.intake import echoes_of, jobs_of
from services.openai.observed import Observed
from services.openai.request_names import RequestNames, job_id, new_request_key
from services.openai.route import CHAT, COMPLETIONS, GENERATE, GENERATE_STREAM, Route, answer_to
from services.openai.token_names import TokenNames
from services.settings import Api
from services.text.model import TextModel

BOTH_SIDES = (CHAT, COMPLETIONS)  # the routes that the upstream has, too


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
        sides: Sides,
    ) -> None:
        self._api = api
        self._catalog = catalog
        self._readiness = readiness
        self._exchange = exchange
        self._requests = requests
        self._bus = bus
        self._names = names
        self._sides = sides
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, COMPLETIONS)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await in_tgi_shape(request, self._generate(request, GENERATE))

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await in_tgi_shape(request, self._generate(request, GENERATE_STREAM))

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
            wishes = Wishes.of(request)
            body = await read_body(request, self._api.max_body_bytes)
            if route in BOTH_SIDES and self._sides.are_two:
                course, fields = self._sides.course(request, body, wishes)
                if course.is_upstream:
                    return await self._sides.forward(
                        request, inbox, fields, course, partial(self.observe, request[TENANT], route)
                    )
                call = await self._read(request, route, body, wishes, course.model)
                with self._sides.mirrored(request, fields, course) as observed:
                    return await self._answered_here(request, inbox, call, observed)
            return await self._answered_here(request, inbox, await self._read(request, route, body, wishes))

    async def _answered_here(
        self, request: web.Request, inbox: Inbox, call: Call, observed: Observed | None = None
    ) -> web.StreamResponse:
        orders, again = await self._orders(call, request[TENANT], request[REQUEST_KEY])
        if not again:
            await self._readiness.check(call.text.slug, self._api.no_worker_timeout_s)
        answer = answer_to(orders[0].asked, call.text.slug, self._names[call.text.slug])
        self._note(request, call, orders[0].asked, answer)
        async with self._exchange.opened(orders, inbox, again=bool(call.wishes.idempotency_key)):
            if call.wishes.detached:
                return accepted(answer.head.id)
            try:
                if call.asked.stream:
                    connection = cast(ClientConnection, request.protocol)
                    stream = EventStream(request, connection, f"/v1/requests/{answer.head.id}/events")
                    return await stream_answer(stream, inbox, answer, self._api.keepalive_s)
                return await whole_answer(inbox, answer)
            finally:
                if observed is not None:
                    answer.observe(observed)

    async def observe(self, tenant: str, route: Route, fields: dict[str, Any], model: str) -> Observed:
        """Our own answer to a request that the upstream answers."""
        observed, inbox, key = Observed(), Inbox(), new_request_key()
        try:
            asked = route.parse(json.dumps({**fields, "model": model}).encode(), strict=self._api.strict)
            text = self._catalog.find(model)
            jobs = await jobs_of(asked, text, key, self._exchange.owner)
            orders, _ = await self._orders(Call(route, asked, Wishes(), text, jobs), tenant, key)
            answer = answer_to(orders[0].asked, text.slug, self._names[text.slug])
            async with self._exchange.opened(orders, inbox):
                while not answer.is_complete:
                    answer.take(await inbox.get())
        except KvrelayError as error:
            return observed.end(error.error.code if isinstance(error, Ended) else error.code)
        answer.observe(observed)
        return observed.end()

    async def _read(
        self, request: web.Request, route: Route, body: bytes, wishes: Wishes, model: str | None = None
    ) -> Call:
        """Everything that can be refused without the bus is refused here. `model`: if not the one that is asked for."""
        asked = route.parse(body, strict=self._api.strict)
        text = self._catalog.find(model or asked.model or self._catalog.default)
        if wishes.idempotency_key:
            request[REQUEST_KEY] = wishes.request_key
        with telemetry.span("gateway.tokenise"):
            owner = None if wishes.detached else self._exchange.owner
            jobs = await jobs_of(asked, text, request[REQUEST_KEY], owner)
        return Call(route, asked, wishes, text, jobs)

    async def _orders(self, call: Call, tenant: str, key: str) -> tuple[list[Order], bool]:
        """The jobs to publish, and whether they may have been published before."""
        again = False
        if call.wishes.idempotency_key:
            key, again = await newest_try(self._bus, tenant, key, len(call.jobs))
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
            Order(tenant, job, msgspec.structs.replace(first, digest=job_digest(job), echo=echo), returns)
            for job, echo in zip(_renamed(call.jobs, key), echoes, strict=True)
        ], again

    def _note(self, request: web.Request, call: Call, asked: Asked, answer: Answer) -> None:
        request[LOG_FIELDS].update(answer=answer.head.id, model=call.text.slug, stream=bool(call.asked.stream))
        request[REQUEST_KEY] = asked.key
        if request[REQUEST_ID]:
            self._requests.remember(request[TENANT], request[REQUEST_ID], asked.key)


def _renamed(jobs: Sequence[Job], key: str) -> list[Job]:
    return [msgspec.structs.replace(job, id=job_id(key, prompt, len(jobs))) for prompt, job in enumerate(jobs)]
