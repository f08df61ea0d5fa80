"""The life of one generating request, from its body to the end of its answer."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

from aiohttp import web

from schemas.errors import KvrelayError
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from services import telemetry
from services.gateway.body import read_body
from services.gateway.catalog import Catalog
from services.gateway.connection import ClientConnection
from services.gateway.envelope import LOG_FIELDS, REQUEST_ID, REQUEST_KEY
from services.gateway.event_stream import EventStream
from services.gateway.exchange import Exchange
from services.gateway.inbox import ClientGone, Inbox
from services.gateway.readiness import Readiness
from services.openai.answer import Answer, Head, Shape
from services.openai.chat_shape import ChatShape
from services.openai.completion_shape import CompletionShape
from services.openai.intake import jobs_of
from services.openai.request_names import RequestNames
from services.openai.token_names import TokenNames
from services.settings import Api
from services.text.model import TextModel


class Route(NamedTuple):
    """What differs between the two routes."""

    parse: Callable[..., ChatRequest | CompletionRequest]
    shape: Callable[[Head, TokenNames, bool], Shape]
    id_prefix: str


CHAT = Route(parse_chat, ChatShape, "chatcmpl-")
COMPLETIONS = Route(parse_completion, CompletionShape, "cmpl-")


class Generation:
    def __init__(
        self, api: Api, catalog: Catalog, readiness: Readiness, exchange: Exchange, requests: RequestNames
    ) -> None:
        self._api = api
        self._catalog = catalog
        self._readiness = readiness
        self._exchange = exchange
        self._requests = requests
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._names = {slug: TokenNames(text.tokenizer) for slug, text in catalog.models.items()}

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
            asked = route.parse(await read_body(request, self._api.max_body_bytes), strict=self._api.strict)
            text = self._catalog.find(asked.model)
            key = request[REQUEST_KEY]
            with telemetry.span("gateway.tokenise"):
                jobs = await jobs_of(asked, text, key, self._exchange.owner)
            await self._readiness.check(text.slug, self._api.no_worker_timeout_s)
            answer = self._answer(asked, route, text, key, len(jobs))
            log = request[LOG_FIELDS]
            log.update(answer=answer.head.id, model=text.slug, stream=bool(asked.stream))
            if request[REQUEST_ID] != key:
                self._requests.remember(request[REQUEST_ID], key)
            async with self._exchange.opened(jobs, inbox):
                if asked.stream:
                    stream = EventStream(request, connection)
                    await self._stream(stream, inbox, answer, asked.include_usage)
                    return stream.response
                return await self._whole(inbox, answer)

    def _answer(
        self, asked: ChatRequest | CompletionRequest, route: Route, text: TextModel, key: str, num_jobs: int
    ) -> Answer:
        head = Head(id=route.id_prefix + key, model=text.slug)
        shape = route.shape(head, self._names[text.slug], asked.include_usage)
        return Answer(head, shape, num_jobs, asked.n or 1, asked.num_logprobs is not None)

    async def _whole(self, inbox: Inbox, answer: Answer) -> web.Response:
        while not answer.is_complete:
            answer.add(await inbox.get())
        return web.Response(body=answer.whole(), content_type="application/json")

    async def _stream(self, stream: EventStream, inbox: Inbox, answer: Answer, include_usage: bool) -> None:
        """An error before the head went out is raised; a later one is the stream's last event."""
        try:
            while True:
                try:
                    async with asyncio.timeout_at(stream.last_write_s + self._api.keepalive_s):
                        arrived = await inbox.get()
                except TimeoutError:
                    await stream.keep_alive()
                    continue
                chunks = answer.add(arrived)
                if answer.is_complete:
                    break
                await stream.send(chunks)
            await stream.finish([*chunks, answer.usage_chunk()] if include_usage else chunks)
        except ConnectionError as error:
            raise ClientGone("the client went away") from error
        except ClientGone:
            raise
        except KvrelayError as error:
            if not stream.has_begun:
                raise
            await stream.fail(error)
