"""What real workers count of a job rides in their beats."""

from schemas.meter import Meter
from tests.pipeline.conftest import Pipelines


async def test_a_job_is_counted(tiny_pipelines: Pipelines):
    async with tiny_pipelines() as pipeline:
        job = {"prompt": "a text that fills a block or two", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        await pipeline.ask(**job)
        before = pipeline.decode_worker.process.beat().meter
        answer = await pipeline.ask(**job)
        # Workers of one process count together; elsewhere each has a meter of its own.
        meter: Meter = pipeline.decode_worker.process.beat().meter.since(before)
        assert meter.generated_tokens == 9
        assert (sum(meter.ttft.values()), sum(meter.itl.values())) == (1, 8)
        assert meter.asked_tokens == answer.end.usage.prompt_tokens
        assert meter.hit_tokens == answer.end.usage.cached_tokens > 0
        assert meter.prompt_tokens == meter.asked_tokens - meter.hit_tokens
