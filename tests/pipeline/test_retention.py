"""Blocks that go while jobs need them: time is lost, no token changes."""

import asyncio

import pytest

from schemas.events import Done
from tests.pipeline.conftest import Pipelines
from tests.pipeline.gate import DECODE_POINTS, PREFILL_POINTS, Point
from tests.pipeline.local import LocalPipeline

JOB = {"prompt": "a prompt of some blocks " * 4, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SHORT_LIVED = {"ttl_s": 0.5, "partial_ttl_s": 0.5}
POINTS = [point for point in (*PREFILL_POINTS, *DECODE_POINTS) if point.name in {
    "stored, not handed off", "claimed", "mid fetch", "mid stream",
}]  # fmt: skip


async def expired(pipeline: LocalPipeline) -> None:
    """Until the store has none of the prompt's blocks any more; there were some."""
    blocks, store = pipeline.prefill.blocks, pipeline.prefill.store
    refs = blocks.refs("default", "", pipeline.text.tokenizer.encode(str(JOB["prompt"])))
    assert store.counters.writes >= 5
    async with asyncio.timeout(30):
        while store.lookup(refs):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
async def test_blocks_expire_while_the_job_waits_or_runs(tiny_pipelines: Pipelines, point: Point):
    """CASES 10: expired means recompute; what decode has in its pages is its own."""
    async with tiny_pipelines(kv=SHORT_LIVED) as pipeline:
        cold = await pipeline.ask(**JOB, cache_salt="cold")
        with point.gate(pipeline) as gate:
            job = await pipeline.submit(**JOB)
            await gate.wait()
            await expired(pipeline)
            gate.open()
            answer = await pipeline.read(job)
        assert isinstance(answer.end, Done) and len(answer.token_ids()) == 60
        assert answer.essence == cold.essence


async def test_a_store_too_small_for_its_jobs(tiny_pipelines: Pipelines):
    """CASES 24: blocks of one job make room for another's at every moment; every answer is the cold run's."""
    jobs = [JOB | {"prompt": f"{number} {JOB['prompt']}"} for number in range(24)]
    async with tiny_pipelines() as pipeline:
        cold = [answer.essence for answer in await pipeline.ask_all([job | {"cache_salt": "cold"} for job in jobs])]
    async with tiny_pipelines(kv={"max_bytes": 1_000_000, "codec": "none"}) as pipeline:
        for _ in range(2):
            answers = await pipeline.ask_all(jobs)
            assert all(isinstance(answer.end, Done) for answer in answers)
            assert [answer.essence for answer in answers] == cold
        tiers = [*pipeline.prefill.store.tiers, *pipeline.decode.store.tiers]
        assert sum(tier.counters.evicted for tier in tiers) > 10
