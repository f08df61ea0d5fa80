"""Stores and streams that take nothing while jobs run: answers stay the same, and it heals by itself."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.store import KVStore
from schemas.events import Done, Token
from schemas.subjects import REPLIES_STREAM, Stage, stream_name
from services.bus.history import read_all
from services.bus.jetstream import call
from services.worker.runtime import IO_THREADS
from tests.bus.polling import until
from tests.golden.goldens import GOLDENS
from tests.kvstore.conftest import read_only, small_disk  # noqa: F401  (fixtures)
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

BLOCKS: dict[str, dict[str, Any]] = {"kv": {"block_tokens": 16, "codec": "none"}}
NAMES = ["rain for the clerk", "library", "65 tokens", "alphabet"]
ACK_WAIT_S = 2.4


async def num_tokens(pipeline: LocalPipeline, job: str) -> int:
    stored = await read_all(pipeline.bus, "default", job)
    return sum(isinstance(event, Token) for message in stored for event in message.events)


async def reaches(pipeline: LocalPipeline, job: str, tokens: int) -> None:
    async with asyncio.timeout(60):
        while await num_tokens(pipeline, job) < tokens:
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_a_disk_that_fills_up_under_running_workers(pipelines: Pipelines, small_disk: Path):  # noqa: F811
    """10 MB, of which a block takes 0.7: it is full before the cap, in the middle of these answers."""
    async with pipelines(data_dir=small_disk, **BLOCKS) as pipeline:
        answers = await pipeline.ask_all([GOLDENS[name].job(max_tokens=28) for name in NAMES])
        assert [answer.token_ids() for answer in answers] == [GOLDENS[name].token_ids[:28] for name in NAMES]
        snapshots = [runtime.store.snapshot() for runtime in (pipeline.prefill, pipeline.decode)]
        assert sum(found["nvme_evicted"] + found["write_errors"] for found in snapshots) > 0, "it was full"


async def test_a_store_that_becomes_read_only_under_running_workers(
    pipelines: Pipelines,
    tmp_path: Path,
    read_only: Callable[[Path, bool], None],  # noqa: F811
):
    async with pipelines(**BLOCKS) as pipeline:
        store = pipeline.prefill.store
        job = await pipeline.submit(**GOLDENS["library"].job(max_tokens=24))
        await reaches(pipeline, job, 5)
        read_only(tmp_path / "kv", True)
        assert (await pipeline.read(job)).token_ids() == GOLDENS["library"].token_ids[:24]
        before = store.counters.writes
        answer = await pipeline.ask(**GOLDENS["65 tokens"].job(max_tokens=3))
        assert answer.token_ids() == GOLDENS["65 tokens"].token_ids[:3]
        assert store.counters.writes == before and store.counters.write_errors > 0
        read_only(tmp_path / "kv", False)
        await until(lambda: is_well(store))  # within the 10 s that it waits
        answer = await pipeline.ask(**GOLDENS["rain for the clerk"].job(max_tokens=3))
        assert answer.token_ids() == GOLDENS["rain for the clerk"].token_ids[:3]
        assert store.counters.writes > before


async def is_well(store: KVStore) -> bool:
    return not store.troubles


async def test_a_job_is_handed_back_and_taken_over_without_a_store(
    pipelines: Pipelines,
    tmp_path: Path,
    read_only: Callable[[Path, bool], None],  # noqa: F811
):
    """Nothing of it is stored, so the next workers compute all that is known again."""
    (tmp_path / "kv").mkdir()
    read_only(tmp_path / "kv", True)
    golden = GOLDENS["rain for the clerk"]
    quick = {**BLOCKS, "scheduler": {"grace_s": 0.5}}
    async with pipelines(**quick) as pipeline:
        job = await pipeline.submit(**golden.job())
        await reaches(pipeline, job, 5)
    async with pipelines(**quick) as pipeline:
        assert await num_tokens(pipeline, job) < 64, "it was handed back in the middle"
        answer = await pipeline.read(job)
        assert answer.token_ids() == golden.token_ids and isinstance(answer.end, Done)


async def test_a_store_that_hangs_does_not_keep_a_worker_from_leaving(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
):
    """All of its store threads wait for ever: the pipeline closes all the same."""
    monkeypatch.setattr("services.engine.blocks.SAVE_BUDGET_S", 0.1)
    hangs = threading.Event()
    try:
        async with pipelines() as pipeline:
            for runtime in (pipeline.prefill, pipeline.decode):
                for _ in range(IO_THREADS):
                    runtime._io.submit(hangs.wait)
            assert isinstance((await pipeline.ask(**GOLDENS["alphabet"].job(max_tokens=2))).end, Done)
    finally:
        hangs.set()


async def limit(pipeline: LocalPipeline, stream: str, max_msgs: int) -> None:
    config: dict[str, Any] = (await call(pipeline.bus, f"STREAM.INFO.{stream}"))["config"]
    await call(pipeline.bus, f"STREAM.UPDATE.{stream}", config | {"max_msgs": max_msgs})


async def num_stored(pipeline: LocalPipeline, stream: str) -> int:
    return int((await call(pipeline.bus, f"STREAM.INFO.{stream}"))["state"]["messages"])


@pytest.mark.slow
async def test_streams_that_are_full_in_the_middle_of_a_job(pipelines: Pipelines):
    """First the decode queue at the hand-off, then the replies in the middle of it, each for longer than a claim."""
    golden = GOLDENS["library"]
    async with pipelines(bus={"ack_wait_s": ACK_WAIT_S}) as pipeline:
        queue = stream_name(Stage.DECODE, pipeline.text.slug)
        await pipeline.bus.request(f"kvrelay.decode.{pipeline.text.slug}.{'0' * 12}.batch", b"in the way")
        await limit(pipeline, queue, 1)
        job = await pipeline.submit(**golden.job(max_tokens=32))
        await reaches(pipeline, job, 1)
        await asyncio.sleep(1.5 * ACK_WAIT_S)
        assert await num_tokens(pipeline, job) == 1
        await limit(pipeline, queue, -1)
        await reaches(pipeline, job, 10)
        await limit(pipeline, REPLIES_STREAM, await num_stored(pipeline, REPLIES_STREAM))
        seen = await num_tokens(pipeline, job)
        await asyncio.sleep(1.5 * ACK_WAIT_S)
        assert seen <= await num_tokens(pipeline, job) < 32
        await limit(pipeline, REPLIES_STREAM, -1)
        answer = await pipeline.read(job)
        assert answer.token_ids() == golden.token_ids[:32] and isinstance(answer.end, Done)
        claims = {message.claim for message in await read_all(pipeline.bus, "default", job)}
        assert claims == {"prefill.0.1", "decode.1.1"}, "no claim was lost"
