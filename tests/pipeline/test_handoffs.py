"""Between prefill and decode: as wide a job as a worker takes, garbage on the queue, blocks that got lost."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.events import Done, Error
from schemas.handoff import FirstToken
from schemas.subjects import Lane, Stage, decode_subject, stream_name
from services.bus.history import last_message
from services.bus.jetstream import call
from services.engine.blocks import Blocks, FetchBudget
from tests.bus.polling import until
from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import continued, handoff_of, leave
from tests.pipeline.local import LocalPipeline


async def test_as_many_choices_as_a_worker_has_places(pipelines: Pipelines):
    """Nothing else runs: the worker's own wish for the next job must not keep it waiting."""
    async with pipelines(scheduler={"max_sequences": 4}) as pipeline:
        answer = await pipeline.ask(prompt="One, two,", n=4, max_tokens=3, seed=1, ignore_eos=True)
        assert isinstance(answer.end, Done)
        assert [len(answer.token_ids(choice)) for choice in range(4)] == [3, 3, 3, 3]


async def test_garbage_on_the_decode_queue_ends_at_first_sight(pipelines: Pipelines):
    async with pipelines() as pipeline:
        subject = decode_subject(pipeline.text.slug, pipeline.decode.build, Lane.INTERACTIVE)
        for job, rest in (("garbage-1", b""), ("garbage-2", b', "hop": "far"'), ("garbage-3", b', "v": 7')):
            await pipeline.bus.request(subject, b'{"tenant": "default", "job": "%s"%s}' % (job.encode(), rest))
            end = (await pipeline.read(job)).end
            assert isinstance(end, Error) and end.code in ("invalid_request", "unsupported_version")
        assert isinstance((await pipeline.ask(prompt="Still alive?", max_tokens=2)).end, Done)


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.REWORK])
async def test_a_hand_off_that_the_model_cannot_run_ends_and_harms_nobody(tiny_pipelines: Pipelines, stage: Stage):
    """A pass with a token that the model does not have would end the worker, with all of its jobs."""
    job = {"prompt_token_ids": [3, 4, 5], "max_tokens": 4, "seed": 1, "ignore_eos": True}
    async with tiny_pipelines() as pipeline:
        events = (await pipeline.ask(**job)).events[:2]
        sampling = handoff_of(pipeline, job, events).sampling
        for change, param in (
            ({"prompt_token_ids": [3, pipeline.text.vocab_size]}, "prompt_token_ids"),
            ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
            ({"first": [FirstToken(choice=0, id=10**9)]}, "first"),
            ({"sampling": replace(sampling, logit_bias={10**6: 1.0})}, "logit_bias"),
            ({"sampling": replace(sampling, max_tokens=10**6)}, "sampling"),
        ):
            name = await leave(pipeline, handoff_of(pipeline, job, events, **change), events, stage)
            end = (await pipeline.read(name)).end
            assert isinstance(end, Error) and (end.code, end.param) == ("invalid_request", param)
        assert isinstance((await pipeline.ask(**job)).end, Done)


async def test_a_reply_subject_that_cannot_be_the_jobs_ends_it(tiny_pipelines: Pipelines):
    """Somebody purged a part of it, or wrote on it: going on would make wrong text."""
    job = {"prompt_token_ids": [3, 4, 5], "max_tokens": 8, "seed": 1, "ignore_eos": True}
    async with tiny_pipelines() as pipeline:
        events = (await pipeline.ask(**job)).events
        alien = replace(events[3], id=10**6)
        for left in ([*events[:3], *events[4:6]], [*events[:3], alien], [*events[:3], events[2]]):
            handoff = handoff_of(pipeline, job, left)
            await leave(pipeline, handoff, left)
            await until(lambda name=handoff.job: has_error(pipeline, name))
        assert isinstance((await pipeline.ask(**job)).end, Done)


async def has_error(pipeline: LocalPipeline, job: str) -> bool:
    last = await last_message(pipeline.bus, "default", job)
    return last is not None and isinstance(last.events[-1], Error) and last.events[-1].code == "invalid_request"


async def test_a_job_waits_for_stored_blocks_on_one_budget(tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch):
    """However many choices it restores: a store that hangs costs a job half a second, not sixteen times that."""
    budgets: list[tuple[Blocks, FetchBudget | None]] = []
    restore = Blocks.restore

    async def recorded(blocks: Blocks, refs: Any, budget: FetchBudget | None, *args: Any, **options: Any) -> Any:
        budgets.append((blocks, budget))
        return await restore(blocks, refs, budget, *args, **options)

    monkeypatch.setattr(Blocks, "restore", recorded)
    job = {"prompt_token_ids": list(range(3, 45)), "max_tokens": 8, "n": 3, "seed": 1, "ignore_eos": True}
    async with tiny_pipelines() as pipeline:
        events = (await pipeline.ask(**job)).events[:10]
        for blocks, num_blocks in ((pipeline.decode.blocks, 0), (pipeline.prefill.blocks, 3)):
            budgets.clear()
            # Told that blocks are stored which are not, decode has prefill make those of all choices again.
            await continued(pipeline, job, events, salt=f"lost {num_blocks}", stored_blocks=num_blocks)
            own = [budget for where, budget in budgets if where is blocks]
            assert len(own) >= 3 and None not in own and len({id(budget) for budget in own}) == 1


async def test_blocks_that_the_store_lost_are_stored_again(pipelines: Pipelines, tmp_path: Path):
    """Prefill still has them in memory; a decode worker elsewhere would not."""
    job = GOLDENS["rain for the clerk"].job(max_tokens=1)  # prefill alone
    async with pipelines(kv={"block_tokens": 16}) as pipeline:
        await pipeline.ask(**job)
        files = sorted((tmp_path / "kv").rglob("*.kvb"))
        for file in files:
            file.unlink()
        answer = await pipeline.ask(**job)
        assert answer.start.cached_tokens == 64, "four blocks of 16 are resident"
        assert sorted((tmp_path / "kv").rglob("*.kvb")) == files


async def test_a_job_whose_blocks_could_not_be_stored_is_not_sent_back_for_them(pipelines: Pipelines, tmp_path: Path):
    """The hand-off says so, and decode computes the prompt itself at once."""
    (tmp_path / "kv").write_bytes(b"a file where the folder of the store should be")
    golden = GOLDENS["rain for the clerk"]
    async with pipelines(kv={"block_tokens": 16}) as pipeline:
        rework = f"STREAM.INFO.{stream_name(Stage.REWORK, pipeline.text.slug)}"
        before = (await call(pipeline.bus, rework))["state"]["last_seq"]
        answer = await pipeline.ask(**golden.job(max_tokens=3))
        assert answer.token_ids() == golden.token_ids[:3]
        assert (await call(pipeline.bus, rework))["state"]["last_seq"] == before
