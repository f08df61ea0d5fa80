"""A worker that does both stages: the same tokens as two, taken over from and by workers of single stages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.events import Done, Event, Token
from schemas.subjects import Lane
from schemas.wire import encode
from services.both.role import BothRole
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.publish import submit_job
from services.bus.reader import follow
from services.bus.streams import ensure_consumers, ensure_streams
from services.models.registry import build_id
from services.settings import Bus as BusSettings
from services.worker.runtime import Runtime
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import Answer, LocalWorker, run_worker, settings_for
from tests.pipeline.processes import process
from tests.pipeline.tiny import SLUG, tiny_files, tiny_models, tiny_pipeline_text

PROMPTS = [[3 + (7 * number + k) % 200 for k in range(length)] for number, length in enumerate((5, 16, 40, 300))]
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.9, "n": 2}, {"repetition_penalty": 1.3, "logprobs": 2}]
JOBS: list[dict[str, Any]] = [
    {"prompt_token_ids": prompt, "max_tokens": 40, "seed": 3, "ignore_eos": True, **kind}
    for prompt in PROMPTS
    for kind in KINDS
]
LONG = {"prompt_token_ids": PROMPTS[2], "max_tokens": 400, "seed": 9, "ignore_eos": True}


class Client:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def submit(self, job: dict[str, Any], name: str, lane: Lane = Lane.INTERACTIVE) -> None:
        await submit_job(self.bus, "default", SLUG, lane, encode({**job, "id": name}))

    async def read(self, name: str) -> Answer:
        return Answer([event async for event in follow(self.bus, "default", name, 60.0)])

    async def begin(
        self, job: dict[str, Any], name: str, num_tokens: int, lane: Lane = Lane.INTERACTIVE
    ) -> list[Event]:
        """Its events up to that many tokens."""
        await self.submit(job, name, lane)
        events: list[Event] = []
        async for event in follow(self.bus, "default", name, 60.0):
            events.append(event)
            if sum(isinstance(event, Token) for event in events) == num_tokens:
                break
        return events


@pytest.fixture
async def client(broker: str) -> AsyncIterator[Client]:
    settings = BusSettings(ack_wait_s=1.0)  # to wait less for the dead
    async with await Bus.connect(broker, "client", settings) as bus:
        await ensure_streams(bus, SLUG)
        await ensure_consumers(bus, SLUG, build_id(tiny_files(), tiny_models()[0].arithmetic.id))
        yield Client(bus)


@asynccontextmanager
async def both(url: str, folder: Path, **scheduler: Any) -> AsyncIterator[LocalWorker]:
    settings = settings_for(folder, kv={"block_tokens": 16}, bus={"ack_wait_s": 0.6}, scheduler=scheduler)
    runtime = Runtime(settings, tiny_files(), tiny_pipeline_text(), tiny_models()[2])
    async with run_worker(url, runtime, BothRole) as worker:
        yield worker


async def test_one_worker_gives_the_tokens_of_two(
    tiny_pipelines: Pipelines, client: Client, broker: str, tmp_path: Path
):
    """All at once, so that prompts and answers share passes; and again, with everything stored."""
    async with tiny_pipelines(kv={"data_dir": str(tmp_path / "two")}) as pipeline:
        expected = await pipeline.ask_all(JOBS)
    async with both(broker, tmp_path / "one", max_sequences=6, token_budget=512) as worker:
        for turn in ("cold", "warm"):
            names = [f"{turn}-{number}" for number in range(len(JOBS))]
            for name, job in zip(names, JOBS, strict=True):
                await client.submit(job, name)
            answers = await asyncio.gather(*map(client.read, names))
            for answer, two in zip(answers, expected, strict=True):
                assert isinstance(answer.end, Done)
                assert answer.essence == two.essence
        assert all(answer.start.cached_tokens == answer.start.prompt_tokens - 1 for answer in answers)
        assert worker.process.beat().role == "both"
        worker.runtime.pool.check_integrity()


@pytest.mark.parametrize(("lane", "num_at_once"), [(Lane.INTERACTIVE, 6), (Lane.BATCH, 4)])
async def test_answers_that_run_take_no_budget_of_prompts(
    client: Client, broker: str, tmp_path: Path, lane: Lane, num_at_once: int
):
    """Two chunks are the budget, and yet as many run at once as there are places: of batch jobs all but a quarter."""
    names = [f"{lane}-{number}" for number in range(num_at_once)]
    async with both(broker, tmp_path, max_sequences=6, token_budget=512) as worker:
        await asyncio.gather(*(client.begin(LONG, name, 10, lane) for name in names))
        assert worker.process.beat().running == num_at_once
        answers = await asyncio.gather(*map(client.read, names))
    assert all(isinstance(answer.end, Done) for answer in answers)


@pytest.mark.parametrize(("before", "after"), [(["both"], ["prefill", "decode"]), (["decode", "prefill"], ["both"])])
async def test_killed_in_mid_stream_others_go_on(
    client: Client, broker: str, tmp_path: Path, before: list[str], after: list[str]
):
    """A worker for both is followed by one of each kind, and those of single stages by a worker for both."""
    name = f"killed-{before[0]}"
    with ExitStack() as stack:
        first, second = (
            [stack.enter_context(process(role, broker, tmp_path / "kv")) for role in roles] for roles in (before, after)
        )
        async with both(broker, tmp_path / "reference"):
            await client.submit(LONG, f"reference-{before[0]}")
            expected = await client.read(f"reference-{before[0]}")
        for worker in first:
            worker.serve()
        seen = await client.begin(LONG, name, 30)
        for worker in first:
            worker.kill()
        for worker in second:
            worker.serve()
        answer = await client.read(name)
    assert isinstance(answer.end, Done) and answer.events[: len(seen)] == seen
    assert answer.essence == expected.essence
    assert len(seen) < len(answer.events) - 1, "it was killed before its end"


async def test_a_lone_one_that_leaves_ends_what_it_began_and_begins_nothing(
    client: Client, broker: str, tmp_path: Path
):
    async with both(broker, tmp_path, max_sequences=1, grace_s=30.0) as leaving:
        first = await client.begin(LONG, "begun", 3)
        await client.submit(LONG, "waiting")
    assert leaving.process.state == "draining"
    assert await read_all(client.bus, "default", "waiting") == []
    answer = await client.read("begun")
    assert isinstance(answer.end, Done) and answer.events[: len(first)] == first
    assert leaving.runtime.pool.num_held == 0
    async with both(broker, tmp_path):
        later = await client.read("waiting")
    assert later.essence == answer.essence
