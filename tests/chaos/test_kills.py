"""Each kind of process killed with -9 under eight streams: no job unanswered, not a token changed."""

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest

from schemas.events import Error, Event, Start, Token
from services.bus.connection import Bus
from services.bus.reader import follow
from tests.chaos.load import MODEL, SILENCE_S, eight_jobs, essence, run_jobs
from tests.chaos.up import Up, running_up

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


async def kill_after(up: Up, name: str, moment: asyncio.Event) -> None:
    await moment.wait()
    await up.replaced(name, up.kill(name))


@pytest.mark.parametrize(
    ("victim", "kind", "max_tokens", "prompt_chars"),
    [
        ("decode-0", Token, 48, 200),
        pytest.param("prefill-0", Start, 8, 700, marks=pytest.mark.slow),
        pytest.param("nats", Token, 48, 200, marks=pytest.mark.slow),
    ],
)
async def test_killed_under_eight_streams(
    tmp_path: Path, request: pytest.FixtureRequest, victim: str, kind: type[Event], max_tokens: int, prompt_chars: int
):
    """`kind`: the events that are counted to find the moment of the kill."""
    rng = random.Random(7)
    jobs = eight_jobs(max_tokens, prompt_chars)
    async with running_up(tmp_path) as up, await Bus.connect(up.nats, "client") as bus:
        reference = [essence(events) for events in await run_jobs(bus, jobs)]
        for number in range(request.config.getoption("--kills")):
            # Another salt each time: the blocks of earlier rounds must not make prefill trivial.
            salted = [{**job, "cache_salt": str(number)} for job in jobs]
            moment = asyncio.Event()
            left = rng.randrange(1, 200 if kind is Token else 8)

            def count(event: Event, moment: asyncio.Event = moment) -> None:
                nonlocal left
                left -= isinstance(event, kind)
                if left <= 0:
                    moment.set()

            killer = asyncio.create_task(kill_after(up, victim, moment))
            streams = await run_jobs(bus, salted, count)
            await killer
            assert [essence(events) for events in streams] == reference


async def test_a_dead_gateway_and_a_lost_client_stop_the_compute(tmp_path: Path):
    """The gateway's jobs end as cancelled; a NATS reader's exit ends nothing."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0,
    }  # fmt: skip
    async with running_up(tmp_path, KVRELAY_API_RESUME_GRACE_S="0.5") as up, await Bus.connect(up.nats, "c") as bus:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{up.http}/v1/chat/completions", json=body) as answer:
                job = await job_of(answer)
            assert (await end_of(bus, job)).code == "cancelled", "the client left"
            answer = await session.post(f"{up.http}/v1/chat/completions", json=body)
            job = await job_of(answer)
            dead = up.kill("gateway")
            assert (await end_of(bus, job)).code == "cancelled", "its gateway died"
            answer.close()
            await up.replaced("gateway", dead)
        (stream,) = await run_jobs(bus, [{"prompt": "Once", "max_tokens": 4}])
        essence(stream)


async def job_of(answer: aiohttp.ClientResponse) -> str:
    """The job's id, once its first token has come."""
    assert answer.status == 200
    async for line in answer.content:
        if b'"content"' in line:
            chunk = json.loads(line.removeprefix(b"data: "))
            return "req-" + str(chunk["id"]).removeprefix("chatcmpl-")
    raise AssertionError("the stream ended")


async def end_of(bus: Bus, job: str) -> Error:
    last: Event | None = None
    async for event in follow(bus, "default", job, SILENCE_S):
        last = event
    assert isinstance(last, Error), last
    return last
