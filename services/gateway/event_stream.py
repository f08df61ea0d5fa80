"""One server-sent-events answer (WHATWG HTML, section 9.2): when its head goes out, and how each step is written."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from aiohttp import HttpVersion11, web

from services.gateway.connection import ClientConnection
from services.gateway.envelope import common_headers
from services.openai.answer import Chunk

# No blank line behind it: OpenAI's client would take that for the end of an event, once it has seen an `id:`.
_COMMENT = b": keep-alive\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class EventStream:
    """The status is 200 once the first write went out; until then the caller may still refuse with a real one.

    Every method raises `ConnectionError` once the client is gone.
    """

    def __init__(
        self, request: web.Request, connection: ClientConnection, location: str = "", retry_ms: int = 0
    ) -> None:
        """`location`: where a reader who lost the stream comes back for the rest of it; an EventSource does so after
        `retry_ms`, if that is said."""
        self._preamble = b"retry: %d\n" % retry_ms if retry_ms else b""
        self._request = request
        self._connection = connection
        self._has_begun = False
        self._is_chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self.last_write_s = self._loop.time()  # or when the request was accepted
        self._response = web.StreamResponse(headers={**_HEADERS, **common_headers(request)})
        if location:
            self._response.headers["Content-Location"] = location
        # A stream may end in the middle: the end of its connection says so to clients that do not look for [DONE],
        # and none of them sends its next request on a connection that is about to be closed.
        self._response.force_close()

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    @contextlib.contextmanager
    def not_silent_for(self, seconds: float, on_silence: Callable[[], None]) -> Iterator[None]:
        """Calls `on_silence` whenever nothing was written for so long. One timer for many writes: they move what it
        waits for, and not the timer."""
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            left_s = self.last_write_s + seconds - self._loop.time()
            if left_s <= 0.0:
                on_silence()
            timer = self._loop.call_later(left_s if left_s > 0.0 else seconds, look)

        timer = self._loop.call_at(self.last_write_s + seconds, look)
        try:
            yield
        finally:
            timer.cancel()

    async def send(self, chunks: Sequence[Chunk]) -> None:
        """All chunks of a step in one write, so that they reach the client together."""
        if chunks:
            await self._write(_framed(chunks))

    @property
    def has_room(self) -> bool:
        """Whether `send_now` may be used: the stream has begun, and its reader keeps up with it."""
        return self._has_begun and self._connection.has_room

    def send_now(self, chunks: Sequence[Chunk]) -> None:
        """As `send`, without waiting."""
        if chunks:
            self._connection.send_now(self._in_chunk(_framed(chunks)))
            self.last_write_s = self._loop.time()

    async def keep_alive(self) -> None:
        await self._write(_COMMENT)

    async def pass_on(self, data: bytes) -> None:
        """A part of somebody else's stream, as it is."""
        await self._write(data)

    async def finish(self, chunks: Sequence[Chunk]) -> None:
        """The last chunks: of an answer that went well, with [DONE] at their end; or what went wrong."""
        await self.send(chunks)
        await self._end()

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
            self._connection.probe = self._probe
            data = self._preamble + data
            await self._response.write(data)
            self._has_begun = True
        else:
            await self._connection.send(self._in_chunk(data))
        self.last_write_s = self._loop.time()

    async def _end(self) -> None:
        self._connection.probe = None
        await self._response.write_eof()

    def _probe(self) -> None:
        """A comment past aiohttp's writer, which has no way to write without waiting."""
        transport = self._connection.transport
        if transport is None:
            return
        transport.write(self._in_chunk(_COMMENT))

    def _in_chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data


def _framed(chunks: Sequence[Chunk]) -> bytes:
    return b"".join(b"id: %b\ndata: %b\n\n" % (id_.encode(), data) for id_, data in chunks)
