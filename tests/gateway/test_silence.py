"""CASES 39: comments fill every silence of a stream until its end, and who reads events sees nothing of them."""

import asyncio
import json

import openai

from tests.gateway.conftest import MakePipeline
from tests.gateway.scripted_worker import Work, ending, token
from tests.gateway.sse import parse


async def test_comments_come_before_and_between_tokens_and_end_with_the_answer(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(keepalive_s=0.05)
    go_on: asyncio.Queue[None] = asyncio.Queue()

    async def script(work: Work) -> None:
        await go_on.get()
        await work.say(work.start())
        for index in range(3):
            await go_on.get()
            await work.say(token(index, f"word{index} "))
        await go_on.get()
        await work.say(*ending(work.job, 3))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert (response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]) == ("no-cache", "no")
        whole = b""
        for _ in range(5):  # before the start, and behind it and each token
            num_comments = 0
            while num_comments < 3:
                read = await response.content.readline()
                assert read, "the stream has ended"
                whole += read
                num_comments += read == b": keep-alive\n"
            go_on.put_nowait(None)
        whole += await response.content.read()
    text = whole.decode()
    *events, done = parse(text)
    assert done.data == "[DONE]" and text.endswith("data: [DONE]\n\n"), "nothing follows it"
    said = [json.loads(event.data)["choices"][0]["delta"].get("content") for event in events]
    assert "".join(one or "" for one in said) == "word0 word1 word2 "


async def test_the_official_client_sees_data_only(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(keepalive_s=0.05)
    going: asyncio.Queue[None] = asyncio.Queue()

    async def script(work: Work) -> None:
        if work.job.n == 2:
            await work.lost.wait()
        await work.say(work.start())
        for index in range(3):
            await going.get()
            await work.say(token(index, "x"))
        await going.get()
        await work.say(*ending(work.job, 3))

    async def witness() -> None:
        """Three comments of a stream that began later: the other one had as many."""
        async with pipeline.post(pipeline.chat(stream=True, n=2)) as response:
            for _ in range(3):
                while await response.content.readline() != b": keep-alive\n":
                    assert not response.content.at_eof()

    pipeline.worker.script = script
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=pipeline.model, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        await witness()
        for _ in range(4):
            going.put_nowait(None)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "x", "x", "x", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
