"""Jobs that end while they are queued and nobody works: the gateway writes the end, and whoever comes later settles."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec

from schemas.beat import Beat
from schemas.events import Accepted, Done, Error
from schemas.state import JobState
from schemas.subjects import Stage, stream_name
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.jetstream import call
from services.bus.job_state import look
from services.bus.streams import ensure_streams
from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from services.text.model import TextModel
from tests.pipeline.conftest import Pipelines


@contextlib.asynccontextmanager
async def gateway_without_workers(url: str, text: TextModel) -> AsyncIterator[Gateway]:
    """It hears workers that take nothing, as if they had died the moment before."""
    async with await Bus.connect(url, "gateway-queued") as bus:
        await ensure_streams(bus, text.slug)
        settings = msgspec.structs.replace(Settings(), api=Api(port=0, resume_grace_s=0.0))
        gateway = Gateway(settings, bus, "gateway-queued", {text.slug: text})
        beats = [Beat(process=f"{r}-1", role=r, state="ok", model=text.slug, build="b") for r in ("prefill", "decode")]
        publishers = [BeatPublisher(bus, lambda beat=beat: beat) for beat in beats]
        await gateway.start()
        for publisher in publishers:
            await publisher.start()
        try:
            yield gateway
        finally:
            await gateway.close()
            for publisher in publishers:
                await publisher.close()


async def num_queued(bus: Bus, slug: str) -> int:
    return int((await call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, slug)}"))["state"]["messages"])


async def test_queued_jobs_end_without_workers_and_do_no_work_later(
    pipelines: Pipelines, broker: str, text: TextModel, tmp_path: Path
):
    body = {"model": text.slug, "messages": [{"role": "user", "content": "Once upon a time"}]}
    ends = {"timeout_s": "deadline_exceeded", "ttft_timeout_s": "deadline_exceeded", "leaves": "cancelled"}
    jobs: dict[str, str] = {}
    async with gateway_without_workers(broker, text) as gateway, aiohttp.ClientSession() as session:
        url = f"{gateway.url}/v1/chat/completions"
        for how in ("timeout_s", "ttft_timeout_s"):
            async with session.post(url, json={**body, how: 0.3}) as response:
                assert response.status == 504
                assert (await response.json())["error"]["code"] == "deadline_exceeded"
                jobs[how] = f"req-{response.headers['X-Request-Id']}"
        asking = asyncio.create_task(session.post(url, json=body).__aenter__())
        while not gateway.exchange.jobs:
            await asyncio.sleep(0.01)
        ((_, jobs["leaves"]),) = gateway.exchange.jobs
        asking.cancel()  # closes its connection
        while gateway.exchange.jobs:
            await asyncio.sleep(0.01)
    async with pipelines() as pipeline:
        bus = pipeline.bus
        async with asyncio.timeout(30):
            while await num_queued(bus, text.slug):
                await asyncio.sleep(0.02)
        for how, job in jobs.items():
            stored = await read_all(bus, "default", job)
            accepted, end = [event for message in stored for event in message.events]
            assert isinstance(accepted, Accepted) and isinstance(end, Error) and end.code == ends[how]
            assert {message.claim for message in stored} == {""}, "no worker has written a word"
            state = (await look(bus, "default", job)).state
            assert state is (JobState.CANCELLED if how == "leaves" else JobState.FAILED)
        assert list(tmp_path.rglob("*.kvb")) == [], "nothing was computed"
        assert isinstance((await pipeline.ask(prompt="Once upon a time", max_tokens=2)).end, Done)
        assert list(tmp_path.rglob("*.kvb"))
