"""One client's TCP connection, with what aiohttp's own protocol does not tell.

- `gone`: the client cannot be answered any more. aiohttp lets handlers run on without a word.
- A half-close (the client is done sending and still reads) is no disconnect. TCP cannot tell it from a close until
  something is written, so after the client's end of file the connection is probed: with `100 Continue`, which every
  HTTP/1.1 client skips, before the answer's head, and with an SSE comment after it.
- A client that does not finish its request is refused with 408 (see `read_watch`).
- A reader that stalls: what it does not read is held up to a known size, then for a limited time, then the
  connection is cut.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler

from schemas.errors import Internal, InvalidRequest, KvrelayError, RequestTimeout
from services.gateway.read_watch import Owed, ReadWatch
from services.gateway.refusal import refusal

PROBE_DELAY_S = 0.3  # an answer that is ready by then is sent without any probe
PROBE_INTERVAL_S = 0.25  # the first write after a close draws the reset, the second one notices it
MAX_KERNEL_BUFFER_BYTES = 262_144

_log = logging.getLogger("kvrelay.gateway")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TIMEOUT_HEAD = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
)


class ClientConnection(RequestHandler):
    def __init__(self, manager: web.Server, read_timeout_s: float, **options: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self.is_gone = False
        self.has_stalled = False
        self.probe: Callable[[], None] | None = None
        self._on_gone: Callable[[bool], None] | None = None
        self._request: web.BaseRequest | None = None  # the one at hand, from before its handler's task runs
        self._request_factory = self._remembered(self._request_factory)
        self._half_closed = False
        self._timeout_s = 0.0
        self._probe_handle: asyncio.TimerHandle | None = None
        self._stall_handle: asyncio.TimerHandle | None = None
        self._reading = ReadWatch(
            read_timeout_s, self._owed, lambda: self._reading_paused or self._buffer_paused, self._on_late
        )

    def _remembered(self, make: Any) -> Any:
        def remember(*parts: Any) -> web.BaseRequest:
            request: web.BaseRequest = make(*parts)
            self._request = request
            return request

        return remember

    @contextlib.contextmanager
    def attended(self, on_gone: Callable[[bool], None], max_bytes: int, timeout_s: float) -> Iterator[None]:
        """While a handler works on an answer: `on_gone(has_stalled)` is called when the client cannot get it any more.

        At most `max_bytes` of it wait for the client to read them; afterwards the rest must be read.
        """
        self._on_gone = on_gone
        self.probe = self._probe_before_head
        self._bound_buffer(max_bytes, timeout_s)
        if self._half_closed:
            self._start_probing()
        try:
            yield
        finally:
            self._on_gone = self.probe = None
            self._bound_buffer(0, timeout_s)

    def _bound_buffer(self, max_bytes: int, timeout_s: float) -> None:
        """From now on writes wait while more than `max_bytes` are unread, and a client that then reads nothing for
        `timeout_s` is cut off. 0 bytes: what is left must be read.

        The kernel's own buffer is bounded too: left alone it grows to megabytes and hides a stalled reader.
        """
        if self.transport is None:
            return
        self._timeout_s = timeout_s
        sock = self.transport.get_extra_info("socket")
        if sock is not None and max_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(max_bytes, MAX_KERNEL_BUFFER_BYTES))
        self.transport.set_write_buffer_limits(high=max_bytes)

    def data_received(self, data: bytes) -> None:
        """aiohttp queues its complaint about a badly framed body behind the request that waits for the rest of it."""
        super().data_received(data)
        request = self._request
        if self._messages and request is not None and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError("the body is badly framed"))
            request.content.feed_eof()
            self.close()
        self._reading.heard()

    def _owed(self) -> Owed:
        """What of a request is still to come; of an idle connection nothing."""
        if self._messages:
            return "" if self._messages[-1][1].is_eof() else "body"
        if self._waiter is not None:
            return "" if self._waiter.done() else "head"
        return "body" if self._request is not None and not self._request.content.is_eof() else ""

    def _on_late(self, owed: Owed) -> None:
        late = RequestTimeout(f"the {owed} of the request did not come in time (api.read_timeout_s)")
        if owed == "body" and self._request is not None:
            self._request.content.set_exception(late)
            self._request.content.feed_eof()  # or aiohttp would read on behind the answer, and log what it is told
            self.close()
        elif self.transport is not None:
            body = refusal(late).body
            assert isinstance(body, bytes)
            self.transport.write(_TIMEOUT_HEAD % len(body) + body)
            self.force_close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._timeout_s and self.transport is not None:
            self._watch_progress(self.transport, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    @property
    def has_room(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and not self._paused

    def send_now(self, data: bytes) -> None:
        """As `send`, where there `has_room`."""
        assert self.transport is not None
        self.transport.write(data)

    async def send(self, data: bytes) -> None:
        """More of a body whose head and first part have gone through aiohttp's writer, which is six calls deep.

        Returns when there is room for more. Raises `ConnectionError` once the client is gone.
        """
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client went away")
        self.transport.write(data)
        if self._paused:
            await self._drain_helper()

    def _watch_progress(self, transport: asyncio.Transport, unread_bytes: int) -> None:
        """Every `timeout_s` something must have been read. Goes on while a closed connection is being emptied."""
        self._stall_handle = self._loop.call_later(self._timeout_s, self._check_progress, transport, unread_bytes)

    def _check_progress(self, transport: asyncio.Transport, before_bytes: int) -> None:
        unread_bytes = transport.get_write_buffer_size()
        if unread_bytes < before_bytes:
            self._watch_progress(transport, unread_bytes)
            return
        self.has_stalled = True
        transport.abort()

    def _stop_watching(self) -> None:
        if self._stall_handle is not None:
            self._stall_handle.cancel()
            self._stall_handle = None

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the sending side open. TLS knows no half-close: there it ends the connection."""
        is_tls = self.transport is not None and self.transport.get_extra_info("ssl_object") is not None
        if is_tls or not self._owes_answer():
            return None
        self._half_closed = True
        self.close()  # no further request can come
        if self.probe is not None:
            self._start_probing()
        return True

    def _owes_answer(self) -> bool:
        """Whether a whole request has come that is not answered yet."""
        request = self._request
        if request is None or self._waiter is not None:
            return bool(self._messages) and self._messages[0][1].is_eof()
        if request.version < HttpVersion11 and self.probe == self._probe_before_head:
            return False  # HTTP/1.0 knows no 100 Continue; a peer that ends so late is a proxy whose client left
        return request.content.is_eof()

    def _start_probing(self) -> None:
        self._probe_handle = self._loop.call_later(PROBE_DELAY_S, self._probe_and_repeat)

    def _probe_and_repeat(self) -> None:
        if self.transport is None or self.transport.is_closing() or self.probe is None:
            return
        self.probe()
        self._probe_handle = self._loop.call_later(PROBE_INTERVAL_S, self._probe_and_repeat)

    def _probe_before_head(self) -> None:
        request = self._request
        if self.transport is not None and request is not None and request.version >= HttpVersion11:
            self.transport.write(_CONTINUE)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.is_gone = True
        self._request = None
        self._reading.stop()
        self._stop_watching()
        if self._probe_handle is not None:
            self._probe_handle.cancel()
        if self._on_gone is not None:
            self._on_gone(self.has_stalled)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp answers by itself, malformed HTTP first of all, in the shape that clients know."""
        if self.is_gone or request.writer.output_size > 0:
            raise ConnectionError("no answer can be sent any more")
        error: KvrelayError = InvalidRequest(f"not a valid HTTP request: {_without_quote(message or '')}")
        if status >= 500:
            _log.error("request failed", exc_info=exc)
            error = Internal("the gateway failed; its log says more")
        response = refusal(error)
        response.force_close()
        return response


def _without_quote(message: str) -> str:
    """aiohttp shows what it could not read as Python spells it, with a pointer below; its client knows what it sent."""
    return message.split("\n", 1)[0].partition(" when reading: ")[0].rstrip(":")


class GatewayServer(web.Server):
    def __call__(self) -> ClientConnection:
        return ClientConnection(self, **self._kwargs)


class GatewayRunner(web.AppRunner):
    """Runs an application on `ClientConnection`s."""

    def __init__(self, app: web.Application, *, read_timeout_s: float, shutdown_timeout: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._read_timeout_s = read_timeout_s

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return GatewayServer(
            server.request_handler,
            request_factory=server.request_factory,
            read_timeout_s=self._read_timeout_s,
            access_log=None,
            auto_decompress=False,  # compressed bodies are refused; nothing may inflate them first
        )
