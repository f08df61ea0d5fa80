"""Jobs that run for longer than ack_wait, with a second worker waiting for them: each is executed once (CASES 16)."""

import asyncio
from collections import Counter
from typing import Any

from schemas.events import Done
from schemas.subjects import Lane, Stage
from services.bus.jetstream import call
from services.bus.streams import Source
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalWorker
from tests.pipeline.second_worker import second_worker

ACK_WAIT_S = 3.0  # what a busy machine stands still for is less
NUM_TOKENS = 300
MIN_STEP_S = 2.2 * ACK_WAIT_S / NUM_TOKENS  # so that every job takes more than twice ack_wait
JOBS: list[dict[str, Any]] = [
    {"prompt_token_ids": [3 + number] * 5, "max_tokens": NUM_TOKENS, "seed": number, "ignore_eos": True}
    for number in range(6)
]


def count_steps(worker: LocalWorker, steps: Counter[str]) -> None:
    """Tokens sampled by the worker's engine, each step of which takes `MIN_STEP_S`."""
    engine = worker.runtime.engine
    run = engine.run

    async def counted(works: Any) -> Any:
        steps[worker.process.process] += sum(bool(work.samplers) for work in works)
        outcomes, _ = await asyncio.gather(run(works), asyncio.sleep(MIN_STEP_S))
        return outcomes

    engine.run = counted  # type: ignore[method-assign]


async def test_each_job_is_executed_once(tiny_pipelines: Pipelines) -> None:
    steps: Counter[str] = Counter()
    async with tiny_pipelines(scheduler={"max_sequences": 3}, bus={"ack_wait_s": ACK_WAIT_S}) as pipeline:
        async with second_worker(pipeline, Stage.DECODE) as other:
            for worker in (pipeline.decode_worker, other):
                count_steps(worker, steps)
            answers = await pipeline.ask_all(JOBS)
        assert all(isinstance(answer.end, Done) for answer in answers)
        assert [len(answer.token_ids()) for answer in answers] == [NUM_TOKENS] * len(JOBS)
        assert len(steps) == 2 and steps.total() == len(JOBS) * (NUM_TOKENS - 1), "the first comes from prefill"
        source = Source(Stage.DECODE, Lane.INTERACTIVE, pipeline.text.slug, pipeline.decode.build)
        info = await call(pipeline.bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
        assert info["num_redelivered"] == 0
