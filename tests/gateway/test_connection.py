"""What a connection notices of its client: closed, reset, half-closed, stalled; by raw sockets."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from services.gateway.body import read_body
from services.gateway.connection import ClientConnection, GatewayRunner
from services.gateway.envelope import envelope
from services.gateway.event_stream import EventStream
from services.openai.answer import DONE, Chunk

BUFFER_BYTES = 16_384
WRITE_TIMEOUT_S = 0.3
READ_TIMEOUT_S = 0.6
BODY_HEAD = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Server:
    """Answers GET /whole when `release` is set, and streams on GET /stream until then."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.port = 0

    async def run(self) -> AsyncIterator["Server"]:
        app = web.Application(middlewares=[envelope])
        app.add_routes([web.get("/whole", self.whole), web.get("/stream", self.stream), web.get("/flood", self.flood)])
        app.add_routes([web.post("/body", self.body)])
        runner = GatewayRunner(app, read_timeout_s=READ_TIMEOUT_S, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        yield self
        self.release.set()
        await runner.cleanup()

    def attended(self, request: web.Request) -> tuple[ClientConnection, object]:
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        return connection, connection.attended(self._gone, BUFFER_BYTES, WRITE_TIMEOUT_S)

    def _gone(self, has_stalled: bool) -> None:
        if not self.gone.done():
            self.gone.set_result(has_stalled)

    async def whole(self, request: web.Request) -> web.StreamResponse:
        _, attended = self.attended(request)
        with attended:  # type: ignore[attr-defined]
            self.entered.set()
            await self.release.wait()
        return web.Response(text="whole")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        connection, attended = self.attended(request)
        with attended:  # type: ignore[attr-defined]
            stream = EventStream(request, connection)
            await stream.send([Chunk("1", b"1")])
            self.entered.set()
            await self.release.wait()
            await stream.finish([Chunk("2", b"2"), Chunk("2+2", DONE)])
        return stream.response

    async def body(self, request: web.Request) -> web.StreamResponse:
        _, attended = self.attended(request)
        with attended:  # type: ignore[attr-defined]
            self.entered.set()
            await read_body(request, 1000)
        return web.Response(text="body")

    async def flood(self, request: web.Request) -> web.StreamResponse:
        connection, attended = self.attended(request)
        with attended:  # type: ignore[attr-defined]
            stream = EventStream(request, connection)
            while True:
                await stream.send([Chunk("1", b"x" * 4096)])
                await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async for found in Server().run():
        yield found


async def connected(server: Server, request: bytes, receive_bytes: int = 0) -> socket.socket:
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, request)
    return client


async def read_to_end(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    found = b""
    while part := await loop.sock_recv(client, 65536):
        found += part
    client.close()
    return found


def get(path: str, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize("path", ["/whole", "/stream"])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_closed_client_is_gone(server: Server, path: str, reset: bool) -> None:
    client = await connected(server, get(path))
    await server.entered.wait()
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert await server.gone is False


@pytest.mark.parametrize("path", ["/whole", "/stream"])
async def test_a_half_closed_client_gets_its_answer(server: Server, path: str) -> None:
    client = await connected(server, get(path))
    await server.entered.wait()
    client.shutdown(socket.SHUT_WR)
    probe = b"100 Continue" if path == "/whole" else b": keep-alive"
    loop = asyncio.get_running_loop()
    found = b""
    while probe not in found:  # the server has noticed, and wants to know more
        found += await loop.sock_recv(client, 65536)
    assert not server.gone.done()
    server.release.set()
    found += await read_to_end(client)
    assert found.endswith(b"whole" if path == "/whole" else b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_quick_answer_to_a_half_closed_client_has_no_probe(server: Server) -> None:
    client = await connected(server, get("/whole"))
    await server.entered.wait()
    client.shutdown(socket.SHUT_WR)
    server.release.set()
    assert (await read_to_end(client)).startswith(b"HTTP/1.1 200")


async def test_http_1_0_knows_no_probe_so_its_end_of_file_is_a_close(server: Server) -> None:
    client = await connected(server, get("/whole", "1.0"))
    await server.entered.wait()
    client.shutdown(socket.SHUT_WR)
    assert await server.gone is False
    client.close()


async def test_a_reader_that_stalls_is_cut_off(server: Server) -> None:
    client = await connected(server, get("/flood"), receive_bytes=4096)
    assert await server.gone is True
    client.close()


async def test_a_reader_that_is_only_slow_is_not_cut_off(server: Server) -> None:
    client = await connected(server, get("/flood"), receive_bytes=4096)
    loop = asyncio.get_running_loop()
    num_bytes = 0
    while num_bytes < 8 * BUFFER_BYTES:
        num_bytes += len(await loop.sock_recv(client, 4096))
    assert not server.gone.done()
    client.close()
    await server.gone


async def test_a_body_cut_off_by_the_client_ends_quietly(server: Server) -> None:
    client = await connected(server, BODY_HEAD + b"Content-Length: 9\r\n\r\n{}")
    await server.entered.wait()
    client.close()
    assert await server.gone is False


async def test_a_badly_framed_body_is_refused_in_shape(server: Server) -> None:
    client = await connected(server, BODY_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
    await server.entered.wait()
    await asyncio.get_running_loop().sock_sendall(client, b"nonsense\r\n")
    found = await read_to_end(client)
    assert found.startswith(b"HTTP/1.1 400")
    assert b'{"error":{"message":' in found


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"NONSENSE\r\n\r\n", b"not a valid HTTP request: "),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b'not a valid HTTP request: Got more than 8190 bytes"'),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b'Invalid character in Content-Length"'),
    ],
)
async def test_malformed_http_is_refused_in_shape(server: Server, sent: bytes, words: bytes) -> None:
    """What was sent is not quoted as Python would spell it."""
    client = await connected(server, sent)
    found = await read_to_end(client)
    assert found.startswith(b"HTTP/1.0 400") or found.startswith(b"HTTP/1.1 400")
    assert b'{"error":{"message":' in found
    assert words in found and b"b'" not in found and b"bytearray" not in found


@pytest.mark.parametrize("path", ["/whole", "/stream"])
async def test_a_client_may_half_close_at_once(server: Server, path: str) -> None:
    client = await connected(server, get(path))
    client.shutdown(socket.SHUT_WR)
    server.release.set()
    assert (await read_to_end(client)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_half_closes_at_once_and_leaves_is_gone(server: Server) -> None:
    client = await connected(server, get("/whole"))
    client.shutdown(socket.SHUT_WR)
    await server.entered.wait()
    client.close()
    assert await server.gone is False


async def test_a_connection_serves_one_request_after_another(server: Server) -> None:
    server.release.set()
    client = await connected(server, get("/whole") + get("/stream"))
    found = await read_to_end(client)
    assert b"whole" in found
    assert b"data: 2\n\nid: 2+2\ndata: [DONE]" in found


async def test_a_head_that_does_not_end_is_refused_however_busily_it_trickles(server: Server) -> None:
    client = await connected(server, b"GET /whole HTTP/1.1\r\nHost: x\r\n")
    answer = asyncio.create_task(read_to_end(client))
    loop = asyncio.get_running_loop()
    while not answer.done():
        with contextlib.suppress(OSError):
            await loop.sock_sendall(client, b"X-Slow: 1\r\n")
        await asyncio.wait([answer], timeout=READ_TIMEOUT_S / 5)
    head, _, body = (await answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert not server.entered.is_set()


async def test_a_body_that_pauses_for_too_long_is_refused(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = await connected(server, BODY_HEAD + b"Content-Length: 10\r\n\r\n{")
    head, _, body = (await read_to_end(client)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


async def test_connections_that_say_nothing_are_held_and_harm_nobody(server: Server) -> None:
    """Before their first request, and between two."""
    server.release.set()
    idle = [await connected(server, b"") for _ in range(20)]
    loop = asyncio.get_running_loop()
    used = await connected(server, get("/whole"))
    assert (await loop.sock_recv(used, 65536)).endswith(b"whole")
    await asyncio.sleep(1.5 * READ_TIMEOUT_S)
    for client in (*idle, used):
        await loop.sock_sendall(client, get("/whole"))
        assert (await loop.sock_recv(client, 65536)).endswith(b"whole")
        client.close()
