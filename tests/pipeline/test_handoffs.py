"""Between prefill and decode: as wide a job as a worker takes, garbage on the queue, blocks that got lost."""

from pathlib import Path

from schemas.events import Done, Error
from schemas.subjects import Lane, Stage, decode_subject, stream_name
from services.bus.jetstream import call
from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines


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
