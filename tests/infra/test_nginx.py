"""Streams through a real nginx on the sample configuration."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.conftest import MakePipeline
from tests.gateway.scripted_worker import Work, ending, token
from tests.gateway.sse import events, parse
from tests.infra.certificates import Authority
from tests.infra.nginx import Nginx


async def test_events_arrive_as_they_are_made_and_silence_is_filled(
    make_pipeline: MakePipeline, authority: Authority, tmp_path: Path
) -> None:
    pipeline = await make_pipeline(keepalive_s=0.1)
    going: asyncio.Queue[None] = asyncio.Queue()

    async def stepwise(work: Work) -> None:
        await work.say(work.start())
        for index in range(3):
            await going.get()
            await work.say(token(index, f"word{index} "))
        await going.get()
        await work.say(*ending(work.job, 3))

    pipeline.worker.script = stepwise
    with Nginx(tmp_path, pipeline.gateway.url, authority) as nginx:
        url = f"{nginx.url}/v1/chat/completions"
        async with pipeline.session.post(url, json=pipeline.chat(stream=True), ssl=authority.context()) as response:
            assert response.status == 200
            while await response.content.readline() != b": keep-alive\n":  # nothing is said yet
                assert not response.content.at_eof()
            texts: list[str] = []
            going.put_nowait(None)
            async for event in events(response):
                text = _text(event.data)
                if text:
                    texts.append(text)
                    going.put_nowait(None)  # the next word is made once this one has arrived
                if event.data == "[DONE]":
                    break
    assert texts == ["word0 ", "word1 ", "word2 "]


async def test_a_client_that_leaves_is_noticed_behind_it(
    make_pipeline: MakePipeline, authority: Authority, tmp_path: Path
) -> None:
    pipeline = await make_pipeline(keepalive_s=0.2)  # nginx sees it at once, or when it writes the next comment

    async def endless(work: Work) -> None:
        await work.say(work.start())
        await work.say(token(0, "word"))
        await asyncio.Event().wait()

    pipeline.worker.script = endless
    with Nginx(tmp_path, pipeline.gateway.url, authority) as nginx:
        url = f"{nginx.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            response = await session.post(url, json=pipeline.chat(stream=True), ssl=authority.context())
            await anext(events(response))
            response.close()
        async with asyncio.timeout(20):
            await pipeline.worker.cancelled.get()


async def test_a_cut_stream_goes_on_and_errors_keep_their_status(
    make_pipeline: MakePipeline, authority: Authority, tmp_path: Path
) -> None:
    pipeline = await make_pipeline(resume_grace_s=5.0)
    with Nginx(tmp_path, pipeline.gateway.url, authority) as nginx:
        url, context = f"{nginx.url}/v1/chat/completions", authority.context()
        async with pipeline.session.post(url, json=pipeline.chat(stream=True), ssl=context) as response:
            place = response.headers["Content-Location"]
            first = await anext(events(response))
        again = {"Last-Event-ID": first.id}
        async with pipeline.session.get(nginx.url + place, headers=again, ssl=context) as response:
            rest = parse(await response.text())
        assert "".join(_text(event.data) for event in [first, *rest]) == "Hello 世界 👋"
        async with pipeline.session.post(url, data=b"{", ssl=context) as response:
            assert (response.status, response.content_type) == (400, "application/json")
        async with pipeline.session.post(url, json=pipeline.chat("x" * 300_000), ssl=context) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "too_large")


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    chunk: dict[str, Any] = json.loads(data)
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
