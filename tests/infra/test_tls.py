"""TLS at each door, with real certificates: NATS, the gateway, Redis."""

import asyncio
import contextlib
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvstore.redis.tier import RedisTier
from kvstore.tier import BlobName, Life
from schemas.errors import KvUnavailable, SetupError
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.settings import Api
from services.settings import Bus as BusSettings
from services.supervisor.readiness import ask
from tests.gateway.conftest import MakePipeline
from tests.infra.certificates import Authority
from tests.infra.sample_nats import SAMPLES, SampleNats
from tests.kvstore.valkey import Valkey

LOOPBACK = "IP:127.0.0.1"


@pytest.fixture
def tls_nats(tmp_path: Path, authority: Authority) -> Iterator[SampleNats]:
    """The sample with its line for TLS."""
    folder = tmp_path / "conf"
    shutil.copytree(SAMPLES, folder)
    main = folder / "nats.conf"
    main.write_text(main.read_text(encoding="utf-8").replace("# include", "include"), encoding="utf-8")
    tls = (folder / "tls.conf").read_text(encoding="utf-8")
    certificate, key = authority.of("nats", LOOPBACK)
    for here, name in ((certificate, "server.crt"), (key, "server.key"), (authority.ca, "ca.crt")):
        tls = tls.replace(f"/etc/nats/tls/{name}", str(here))
    (folder / "tls.conf").write_text(tls, encoding="utf-8")
    server = SampleNats(tmp_path, main).start()
    try:
        yield server
    finally:
        server.stop()


async def test_nats_takes_who_shows_a_certificate_and_is_checked_itself(
    tls_nats: SampleNats, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.of("worker")
    known = msgspec.structs.replace(
        tls_nats.settings("worker"),
        tls_ca_file=str(authority.ca),
        tls_cert_file=str(certificate),
        tls_key_file=str(key),
    )
    url = tls_nats.url.replace("nats://", "tls://")
    async with await Bus.connect(url, "worker", known) as bus:
        assert "streams" in await call(bus, "INFO")
    stranger = Authority(tmp_path, "stranger")
    foreign_certificate, foreign_key = stranger.of("worker")
    for settings, address in (
        (msgspec.structs.replace(known, tls_cert_file="", tls_key_file=""), url),
        (msgspec.structs.replace(known, tls_cert_file=str(foreign_certificate), tls_key_file=str(foreign_key)), url),
        (msgspec.structs.replace(known, tls_ca_file=str(stranger.ca)), url),
        (known, url.replace("127.0.0.1", "localhost")),  # which the server's certificate is not for
        (tls_nats.settings("worker"), tls_nats.url),
    ):
        with pytest.raises(SetupError, match="no NATS server answers"):
            await Bus.connect(address, "worker", settings, timeout_s=0.7)


@pytest.mark.parametrize(
    "settings",
    [
        BusSettings(tls_ca_file="no-such.crt"),
        BusSettings(tls_cert_file=__file__, tls_key_file=__file__),
        BusSettings(user="worker", password_file="no-such.password"),
    ],
)
async def test_files_that_cannot_be_used_are_named(settings: BusSettings) -> None:
    with pytest.raises(SetupError, match=r"no-such\.(crt|password)|test_tls\.py"):
        await Bus.connect("nats://127.0.0.1:1", "x", settings)


async def test_the_gateway_over_https(make_pipeline: MakePipeline, authority: Authority) -> None:
    certificate, key = authority.of("gateway", LOOPBACK)
    pipeline = await make_pipeline(tls_cert_file=str(certificate), tls_key_file=str(key))
    assert pipeline.url.startswith("https://127.0.0.1:")
    url = f"{pipeline.url}/v1/chat/completions"
    for stream in (False, True):
        body = pipeline.chat(stream=stream)
        async with pipeline.session.post(url, json=body, ssl=authority.context()) as response:
            assert response.status == 200
            assert "Hello" in await response.text()
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await pipeline.session.post(url, json=pipeline.chat(), ssl=ssl.create_default_context())
    with pytest.raises(aiohttp.ClientError):
        await pipeline.session.get(url.replace("https:", "http:"))
    port = int(pipeline.url.rpartition(":")[2])
    api = Api(port=port, tls_cert_file=str(certificate), tls_key_file=str(key))
    found = await asyncio.to_thread(ask, api)  # what `kvrelay up` waits for
    assert found is not None and found.state == "ok"


async def test_a_client_that_leaves_over_https_is_noticed(make_pipeline: MakePipeline, authority: Authority) -> None:
    certificate, key = authority.of("gateway", LOOPBACK)
    pipeline = await make_pipeline(take=False, tls_cert_file=str(certificate), tls_key_file=str(key))
    url = f"{pipeline.url}/v1/chat/completions"
    asking = asyncio.create_task(pipeline.session.post(url, json=pipeline.chat(), ssl=authority.context()).__aenter__())
    while not pipeline.gateway.exchange.jobs:
        await asyncio.sleep(0.01)
    asking.cancel()
    async with asyncio.timeout(20):
        await pipeline.worker.cancelled.get()


class TlsFront:
    """Takes TLS off before a server that knows none: the Valkey of our package is built without it."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._target = port
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.port = 0
        self.num_connections = 0

    def __enter__(self) -> "TlsFront":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with await asyncio.start_server(self._carry, "127.0.0.1", 0, ssl=self._context) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._stop.wait()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
        with contextlib.suppress(OSError):
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def test_redis_over_tls_with_a_password_and_certificates(tmp_path: Path, authority: Authority) -> None:
    """The options are redis-py's, in the URL."""
    certificate, key = authority.of("valkey", LOOPBACK)
    client_certificate, client_key = authority.of("worker")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    name, blob = BlobName("acme", b"k" * 32), b"blob" * 500_000
    valkey = Valkey(tmp_path / "valkey", "--requirepass", "secret").start()
    try:
        with TlsFront(valkey.port, context) as front:
            base = f"rediss://:secret@127.0.0.1:{front.port}/0?ssl_ca_certs={authority.ca}"
            shown = f"&ssl_certfile={client_certificate}&ssl_keyfile={client_key}"
            tier = RedisTier(base + shown, timeout_s=5.0)
            tier.write(name, [memoryview(blob)], Life(time.time(), time.time() + 1000.0))
            into = memoryview(bytearray(len(blob)))
            for _ in range(10):
                assert tier.read(name, [into]) == len(blob)
            assert bytes(into) == blob
            assert front.num_connections == 1
            tier.close()
            stranger = Authority(tmp_path, "stranger")
            for url in (
                base,
                base.replace(str(authority.ca), str(stranger.ca)) + shown,
                (base + shown).replace("secret", "wrong"),
                f"redis://:secret@127.0.0.1:{front.port}/0",
            ):
                refused = RedisTier(url, timeout_s=2.0)
                with pytest.raises(KvUnavailable):
                    refused.present([name])
                refused.close()
            with pytest.raises(SetupError, match=r"kv\.redis_url"):  # options of TLS, and no TLS
                RedisTier(base.replace("rediss", "redis"))
    finally:
        valkey.kill()
