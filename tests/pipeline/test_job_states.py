"""A job watched through the whole pipeline takes only steps of the table."""

import asyncio
import itertools

from schemas.errors import Cancelled
from schemas.job_report import JobReport
from schemas.state import JobState, may_become
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.cancels import cancel_job
from services.bus.chain import open_job
from services.bus.job_state import look
from services.bus.publish import submit_job
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

LONG = "The quick brown fox jumps over the lazy dog. " * 30


async def watched(pipeline: LocalPipeline, job: str) -> list[JobReport]:
    """What was told of a job, look after look, until it had ended."""
    seen: list[JobReport] = []
    async with asyncio.timeout(60):
        while not seen or not seen[-1].state.is_end:
            seen.append(await look(pipeline.bus, "default", job))
            await asyncio.sleep(0.003)
    return seen


def changes(reports: list[JobReport]) -> list[JobState]:
    states = [report.state for report in reports]
    return [state for state, before in zip(states, [None, *states], strict=False) if state is not before]


async def submit(pipeline: LocalPipeline, **job: object) -> None:
    """As the gateway does."""
    await open_job(pipeline.bus, "default", str(job["id"]), pipeline.text.slug)
    await submit_job(pipeline.bus, "default", pipeline.text.slug, Lane.INTERACTIVE, encode(job))


async def test_jobs_take_only_steps_of_the_table(pipelines: Pipelines):
    jobs = [f"watched-{number}" for number in range(2)]
    async with pipelines() as pipeline:
        watches = [asyncio.create_task(watched(pipeline, job)) for job in jobs]
        for number, job in enumerate(jobs):
            fields = {"max_tokens": 10 if number else 1, "n": 2 if number else 1, "ignore_eos": True}
            await submit(pipeline, id=job, prompt=f"{number} {LONG}", seed=1, **fields)
        lives = await asyncio.gather(*watches)
    for life in lives:
        states = changes(life)
        assert all(may_become(before, after) for before, after in itertools.pairwise(states)), states
        assert states[-1] is JobState.DONE
        lengths = [sum(choice.tokens for choice in report.choices) for report in life]
        assert lengths == sorted(lengths)
    assert changes(lives[0])[-2:] == [JobState.PREFILLING, JobState.DONE], "one token: no worker of the other kind"
    assert {JobState.QUEUED, JobState.PREFILLING, JobState.DECODING} <= set(changes(lives[1]))
    last = lives[1][-1]
    assert [choice.tokens for choice in last.choices] == [10, 10]
    assert [str(delivery.stage) for delivery in last.deliveries] == ["prefill", "decode"]
    assert (last.hops, last.model, last.build) == (1, pipeline.text.slug, pipeline.decode.build)
    assert last.timings.keys() >= {"queue_s", "ttft_s"}


async def test_a_job_cancelled_in_the_middle_stays_cancelled(pipelines: Pipelines):
    async with pipelines() as pipeline:
        await submit(pipeline, id="stopped", prompt="Once", max_tokens=2000, ignore_eos=True)
        async with asyncio.timeout(30):
            while (await look(pipeline.bus, "default", "stopped")).state is not JobState.DECODING:
                await asyncio.sleep(0.01)
        assert await cancel_job(pipeline.bus, "default", "stopped", Cancelled("enough"))
        assert not await cancel_job(pipeline.bus, "default", "stopped", Cancelled("again"))
        report = await look(pipeline.bus, "default", "stopped")
        assert report.state is JobState.CANCELLED and report.error is not None and report.error.message == "enough"
        async with asyncio.timeout(30):
            while pipeline.decode.pool.num_held:
                await asyncio.sleep(0.02)
        assert await look(pipeline.bus, "default", "stopped") == report
