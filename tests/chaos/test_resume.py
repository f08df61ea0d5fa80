"""A stream of real tokens over HTTP that is cut again and again, by its client and by the death of its gateway."""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from services.supervisor.ports import free_port
from tests.chaos.load import MODEL
from tests.chaos.up import LOOK_EVERY_S, Up, running_up
from tests.gateway.sse import SseEvent, events

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

MAX_TOKENS = 1600  # longer than a job outlives its gateway, unless somebody else waits for it
BODY = {
    "model": MODEL, "messages": [{"role": "user", "content": "Tell me a very long story about the sea."}],
    "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 7,
}  # fmt: skip


@asynccontextmanager
async def second_gateway(up: Up) -> AsyncIterator[str]:
    port = free_port("127.0.0.1")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "services.cli.main", "gateway", "--data", str(up.data_dir), "--nats", up.nats,
        "--port", str(port), env={**os.environ, "KVRELAY_API_METRICS_PORT": "-1"}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def opened(session: aiohttp.ClientSession, url: str, last_id: str) -> aiohttp.ClientResponse:
    """Tries until the gateway is there, as a browser does."""
    while True:
        try:
            response = await session.get(url, headers={"Last-Event-ID": last_id})
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(LOOK_EVERY_S)
            continue
        assert response.status == 200, await response.text()
        return response


def text_of(got: list[SseEvent]) -> str:
    chunks = [json.loads(event.data) for event in got if event.data != "[DONE]"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_cut_ten_times_and_the_gateway_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    points = sorted(rng.sample(range(2, MAX_TOKENS // 4), 10))
    dying = points[2]
    pipeline = running_up(tmp_path)
    async with pipeline as up, second_gateway(up) as second, aiohttp.ClientSession() as session:
        url = f"{up.http}/v1/chat/completions"
        response = await session.post(url, json={**BODY, "stream": True})
        place = response.headers["Content-Location"]
        got: list[SseEvent] = []
        dead = 0
        for number, point in enumerate([*points, 10**9]):
            async for event in events(response):
                got.append(event)
                if len(got) >= point:
                    break
            if point == dying:
                dead = up.kill("gateway")
            response.close()
            if point < 10**9:
                # From the kill on through the other one, so that nobody else waits for the job.
                base = up.http if number % 2 and point < dying else second
                response = await opened(session, base + place, got[-1].id)
        assert got[-1].data == "[DONE]" and len({event.id for event in got}) == len(got)
        await up.replaced("gateway", dead)
        again = await opened(session, up.http + place, got[0].id)
        assert [event async for event in events(again)] == got[1:], "the new gateway knows it as well"
        headers = {"Idempotency-Key": "the-undisturbed-one"}
        async with session.post(f"{second}/v1/chat/completions", json=BODY, headers=headers) as whole:
            assert (await whole.json())["choices"][0]["message"]["content"] == text_of(got)
        async with session.post(f"{up.http}/v1/chat/completions", json=BODY, headers=headers) as retried:
            assert await retried.json() == await whole.json(), "through another gateway, and not run again"
