"""An HTTP client that goes away: its job stops within a few steps, wherever it is; the next one starts (CASES 21)."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from schemas.events import Error
from schemas.subjects import Stage
from services import telemetry
from services.bus import hub as hub_module
from services.bus.history import read_all
from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from tests.bus.polling import until
from tests.pipeline.conftest import Pipelines
from tests.pipeline.gate import PREFILL_POINTS, Point
from tests.pipeline.leftovers import at_rest, nothing_left
from tests.pipeline.local import LocalPipeline
from tests.pipeline.tiny import SLUG

MAX_STEPS_AFTER = 5
BODY = {
    "model": SLUG,
    "prompt": "Tell me a very long story. " * 4,
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}


class Served(NamedTuple):
    pipeline: LocalPipeline
    gateway: Gateway
    session: aiohttp.ClientSession
    ended: list[dict[str, str]]  # the attributes of every job that was counted

    def post(self, **changes: Any) -> Any:
        return self.session.post(f"{self.gateway.url}/v1/completions", json={**BODY, **changes})


@pytest.fixture
async def served(
    tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Served]:
    """Fails at the end if a task failed that nobody looked at."""
    monkeypatch.setattr(hub_module, "KEEP_S", 0.05)
    ended: list[dict[str, str]] = []
    monkeypatch.setattr(telemetry.jobs, "_add", lambda value, attributes: ended.append(dict(attributes)))
    async with tiny_pipelines(scheduler={"chunk_tokens": 16, "token_budget": 16}) as pipeline:
        settings = msgspec.structs.replace(Settings(), api=Api(port=0, resume_grace_s=0.0))
        gateway = Gateway(settings, pipeline.bus, "gateway-test", {SLUG: pipeline.text})
        await gateway.start()
        async with aiohttp.ClientSession() as session:
            yield Served(pipeline, gateway, session, ended)
        await gateway.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def _some(response: aiohttp.ClientResponse, num_lines: int) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line
            num_lines -= 1
            if not num_lines:
                return


async def the_job(served: Served) -> str:
    ((_, job),) = served.gateway.exchange.jobs
    return job


async def is_cancelled(served: Served, job: str) -> bool:
    stored = await read_all(served.pipeline.bus, "default", job)
    return bool(stored) and isinstance(stored[-1].events[-1], Error) and stored[-1].events[-1].code == "cancelled"


async def test_after_the_third_token(served: Served) -> None:
    async with served.post(max_tokens=3) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    before = await at_rest(served.pipeline)
    progress = served.pipeline.decode_worker.role.batch.progress
    async with served.post() as response:
        assert len([line async for line in _some(response, 3)]) == 3
        job = await the_job(served)
        response.close()
    await until(lambda: is_cancelled(served, job))
    steps = progress.steps
    await nothing_left(served.pipeline, before)
    assert progress.steps - steps <= MAX_STEPS_AFTER
    assert served.ended[-1] == {"code": "cancelled", "stage": "gateway"}
    async with served.post(max_tokens=3) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "point",
    [PREFILL_POINTS[2], Point("queued", Stage.PREFILL, lambda p: (p.prefill_worker.process, "_handle", 0))],
    ids=lambda point: point.name,
)
async def test_before_its_first_token(served: Served, point: Point) -> None:
    """While its prompt is computed, and while no worker has looked at it."""
    async with served.post(max_tokens=3) as response:
        await response.text()
    before = await at_rest(served.pipeline)
    with point.gate(served.pipeline) as gate:
        asking = asyncio.create_task(served.post(prompt="Nothing of it is stored. " * 4).__aenter__())
        await gate.wait()
        job = await the_job(served)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: is_cancelled(served, job))
    await nothing_left(served.pipeline, before)
    assert served.ended[-1] == {"code": "cancelled", "stage": "gateway"}
