"""CASES 20: an answer with a gap is never joined, and who reads slowly costs neither memory nor his neighbours."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from schemas.events import Event
from services.bus.chain import append
from services.bus.history import last_message
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, saying, token
from tests.gateway.sse import parse
from tests.gateway.test_failing import connected, ended, endless

MB = 1_000_000


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gap_ends_the_answer_with_an_error(pipeline: Pipeline, stream: bool) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "a"))
        await work.say(token(2, "c"))
        await work.lost.wait()

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=stream)) as response:
        assert response.status == (200 if stream else 500)
        text = await response.text()
    assert '"c"' not in text and "[DONE]" not in text
    error = json.loads(parse(text)[-1].data if stream else text)["error"]
    assert error["code"] == "internal" and "token 2 came where 1 was expected" in error["message"]
    work = await pipeline.worker.taken.get()
    assert await pipeline.worker.cancelled.get() == work.job.id, "nobody waits for the rest"


async def test_fifty_are_answered_beside_one_that_reads_nothing(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(write_timeout_s=0.5, stream_buffer_bytes=4096, resume_grace_s=60.0)

    async def script(work: Work) -> None:
        await (endless if work.job.max_tokens is None else saying(*"abcdefghij"))(work)

    async def normal() -> str:
        async with pipeline.post(pipeline.chat(stream=True, max_tokens=20)) as response:
            *events, done = parse(await response.text())
        assert done.data == "[DONE]"
        return "".join(json.loads(e.data)["choices"][0]["delta"].get("content") or "" for e in events)

    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat(stream=True), receive_bytes=4096)
    stalled = (await pipeline.worker.taken.get()).job.id
    assert await asyncio.gather(*(normal() for _ in range(50))) == ["abcdefghij"] * 50
    assert await pipeline.worker.cancelled.get() == stalled
    assert (await ended(pipeline, str(stalled))).code == "cancelled"
    client.close()


async def test_what_a_reader_leaves_unread_is_not_kept_for_it(make_pipeline: MakePipeline) -> None:
    """30 MB go by it: they stay in the stream, where it might still read them."""
    pipeline = await make_pipeline(write_timeout_s=60.0, stream_buffer_bytes=65_536)
    all_said = asyncio.Event()
    num_messages, num_tokens = 150, 100
    piece = "x" * (30 * MB // num_messages // num_tokens)

    async def script(work: Work) -> None:
        await work.say(work.start())
        stored = await last_message(pipeline.bus, "default", str(work.job.id))
        assert stored is not None
        last: int | None = stored.sequence
        for number in range(num_messages):  # not by `say`: a worker keeps for a while what a broker might lose
            tokens: list[Event] = [token(number * num_tokens + index, piece) for index in range(num_tokens)]
            last = await append(pipeline.bus, "default", str(work.job.id), tokens, last=last)
            assert last is not None
            if number == 15:
                began.append(rss_bytes())  # buffers have been made, the reader's is full
        all_said.set()
        await work.lost.wait()

    began: list[int] = []
    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat(stream=True), receive_bytes=4096)
    async with asyncio.timeout(60):
        await all_said.wait()
    grown = rss_bytes() - began[0]
    client.close()
    assert grown < 10 * MB
    await pipeline.worker.cancelled.get()
