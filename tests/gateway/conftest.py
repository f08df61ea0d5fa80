"""One nats-server a module; a gateway with a model and a scripted worker of its own for each test."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.gateway.gateway import Gateway
from services.settings import Api, Settings, Upstream
from services.settings import Bus as BusSettings
from tests.bus.throwaway import throwaway_server
from tests.gateway.scripted_worker import ScriptedWorker
from tests.gateway.tiny_model import tiny_text

API = Api(port=0, resume_grace_s=0.0, max_body_bytes=200_000)
BUS = BusSettings(ack_wait_s=0.6, max_payload_bytes=262_144, sync_interval="2s")

_numbers = itertools.count()


@dataclass
class Pipeline:
    """A gateway over a scripted worker. `model` is the slug of its only model."""

    model: str
    gateway: Gateway
    worker: ScriptedWorker
    bus: Bus
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.gateway.url

    def chat(self, content: Any = "hi", **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        return self.session.post(self.url + path, json=body)


MakePipeline = Callable[..., Awaitable[Pipeline]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("gateway"), settings=BUS) as running:
        yield running


@pytest.fixture
async def make_pipeline(server: NatsServer) -> AsyncIterator[MakePipeline]:
    """`take` False: the worker beats and takes nothing; None: there is none. Other keywords are keys of [api].

    `upstream`: keys of [upstream].
    """
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            take: bool | None = True,
            bus: BusSettings = BUS,
            url: str = "",
            upstream: dict[str, Any] | None = None,
            **api: Any,
        ) -> Pipeline:
            slug = f"tiny-{next(_numbers)}"
            other = msgspec.convert({**(upstream or {})}, Upstream)
            settings = Settings(api=msgspec.structs.replace(API, **api), bus=bus, upstream=other)
            ours = await stack.enter_async_context(await Bus.connect(url or server.url, f"gateway-{slug}", bus))
            theirs = await stack.enter_async_context(await Bus.connect(url or server.url, f"worker-{slug}", bus))
            worker = ScriptedWorker(theirs, slug)
            text = tiny_text(slug)
            gateway = Gateway(settings, ours, f"gateway-{slug}", {slug: text, f"Org/{slug}": text})
            await gateway.start()
            stack.push_async_callback(gateway.close)
            if take is not None:
                await worker.start(take=take)
                stack.push_async_callback(worker.close)
                await gateway.readiness.check(slug, 5.0)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Pipeline(slug, gateway, worker, theirs, session)

        yield make


@pytest.fixture
async def pipeline(make_pipeline: MakePipeline) -> Pipeline:
    return await make_pipeline()
