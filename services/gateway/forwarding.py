"""What the upstream answers, carried to our client: streamed as it comes, or whole."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from schemas.errors import KvrelayError, SetupError, UpstreamUnavailable
from schemas.openai import error_body
from services import telemetry
from services.gateway.connection import ClientConnection
from services.gateway.course import SERVED_BY_HEADER, UPSTREAM, Course
from services.gateway.envelope import LOG_FIELDS
from services.gateway.event_stream import EventStream
from services.gateway.inbox import Inbox
from services.gateway.mirror import Mirrored
from services.gateway.upstream import Refused, UpstreamAnswer, UpstreamClient, headers_of
from services.openai.observed import Observed, Reading
from services.settings import Api, Upstream

T = TypeVar("T")


class Forwarding:
    """Has a client of the upstream from `start` to `close`, if there is one."""

    def __init__(self, settings: Upstream, api: Api) -> None:
        self._settings = settings
        self._api = api
        self._client: UpstreamClient | None = None

    def start(self) -> None:
        """Raises `SetupError`."""
        if self._settings.url:
            self._client = UpstreamClient(self._settings)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def answer(
        self, request: web.Request, inbox: Inbox, body: dict[str, Any], course: Course, mirrored: Mirrored | None
    ) -> web.StreamResponse:
        """Raises `UpstreamUnavailable`, `UpstreamTimeout`, or `ClientGone`: then the upstream hears of it."""
        request[LOG_FIELDS].update(served_by=UPSTREAM, why=course.why, model=course.model)
        code, reading = "cancelled", Reading()  # if our client leaves it
        if mirrored is not None:
            mirrored.answered = reading.observed
        try:
            response = await _unless_left(inbox, self._carried(request, _spelled(body, course.model), reading))
            code = reading.observed.error or "ok"
            return response
        except KvrelayError as error:
            code = error.code
            raise
        except Refused as refused:
            code = str(refused.status)
            headers = {**refused.headers, SERVED_BY_HEADER: UPSTREAM}
            kind = "application/json"
            return web.Response(body=refused.body, status=refused.status, content_type=kind, headers=headers)
        finally:
            telemetry.forwarded.add(why=course.why, code=code)
            if mirrored is not None:
                mirrored.end("" if code == "ok" else code)

    async def observe(self, path: str, headers: dict[str, str], body: dict[str, Any], model: str) -> Observed:
        """The upstream's answer to a request that is answered here."""
        reading = Reading()
        try:
            async with self._upstream.post(path, _spelled(body, model), headers) as answer:
                if answer.is_stream:
                    async for part in answer.parts():
                        reading.add_part(part)
                    _check_end(reading)
                else:
                    reading.add_whole(await answer.whole())
        except KvrelayError as error:
            return reading.observed.end(error.code)
        except Refused as refused:
            return reading.observed.end(str(refused.status))
        return reading.observed.end()

    @property
    def _upstream(self) -> UpstreamClient:
        if self._client is None:
            raise SetupError("upstream.url is empty", param="upstream.url")
        return self._client

    async def _carried(self, request: web.Request, body: bytes, reading: Reading) -> web.StreamResponse:
        async with self._upstream.post(request.path, body, headers_of(request)) as answer:
            if answer.is_stream:
                return await self._streamed(request, answer, reading)
            whole = await answer.whole()
            reading.add_whole(whole)
            return web.Response(body=whole, content_type="application/json", headers={SERVED_BY_HEADER: UPSTREAM})

    async def _streamed(self, request: web.Request, answer: UpstreamAnswer, reading: Reading) -> web.StreamResponse:
        """Comments keep it alive between two lines. What breaks it off is told in an event, without a [DONE]: also
        where it was closed in good order, as one is whose server stopped behind a proxy."""
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        stream = EventStream(request, connection)
        stream.response.headers[SERVED_BY_HEADER] = UPSTREAM
        parts, ending = aiter(answer.parts()), b"\n"
        coming = asyncio.ensure_future(anext(parts, b""))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=self._api.keepalive_s)
                if not done:
                    if ending == b"\n":
                        await stream.keep_alive()
                    continue
                part = coming.result()
                if not part:
                    _check_end(reading)
                    break
                ending = part[-1:]
                reading.add_part(part)
                await stream.pass_on(part)
                coming = asyncio.ensure_future(anext(parts, b""))
        except KvrelayError as error:
            reading.observed.error = error.code
            if not stream.has_begun:
                raise
            await stream.pass_on(b"\n\ndata: %b\n\n" % msgspec.json.encode(error_body(error)))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await stream.finish([])
        return stream.response


def _check_end(reading: Reading) -> None:
    """Of a stream that is over. Raises `UpstreamUnavailable` if it has not said so itself."""
    reading.end_stream()
    if not reading.is_whole:
        raise UpstreamUnavailable("the upstream broke off in the middle of its answer")


async def _unless_left(inbox: Inbox, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled once the client has left: raises `ClientGone`."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(inbox.get())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _spelled(body: dict[str, Any], model: str) -> bytes:
    """The request under the model's name there. All else goes as it came: the upstream may know more than we do."""
    return json.dumps({**body, "model": model}).encode()
