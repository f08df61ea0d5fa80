"""One server-sent-events answer (WHATWG HTML, section 9.2): when its head goes out, and how each step is written."""

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import HttpVersion11, web

from schemas.errors import KvrelayError
from schemas.openai import error_body
from services.gateway.connection import ClientConnection
from services.gateway.envelope import common_headers

_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class EventStream:
    """The status is 200 once the first write went out; until then the caller may still refuse with a real one.

    Every method raises `ConnectionError` once the client is gone.
    """

    def __init__(self, request: web.Request, connection: ClientConnection) -> None:
        self._request = request
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.last_write_s = self._loop.time()  # or when the request was accepted
        self._response = web.StreamResponse(headers={**_HEADERS, **common_headers(request)})
        # A stream may end in the middle: the end of its connection says so to clients that do not look for [DONE],
        # and none of them sends its next request on a connection that is about to be closed.
        self._response.force_close()

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    async def send(self, chunks: Sequence[bytes]) -> None:
        """All chunks of a step in one write, so that they reach the client together."""
        if chunks:
            await self._write(b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks))

    async def keep_alive(self) -> None:
        await self._write(_COMMENT)

    async def finish(self, chunks: Sequence[bytes] = ()) -> None:
        """The normal end: last chunks and [DONE]."""
        await self._write(b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks) + _DONE)
        await self._end()

    async def fail(self, error: KvrelayError) -> None:
        """The end of a stream that went wrong: no [DONE]."""
        await self.send([msgspec.json.encode(error_body(error))])
        await self._end()

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
            self._connection.probe = self._probe
        self.last_write_s = self._loop.time()
        await self._response.write(data)

    async def _end(self) -> None:
        self._connection.probe = None
        await self._response.write_eof()

    def _probe(self) -> None:
        """A comment past aiohttp's writer, which has no way to write without waiting."""
        transport = self._connection.transport
        if transport is None:
            return
        chunked = self._request.version >= HttpVersion11
        transport.write(b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT) if chunked else _COMMENT)
