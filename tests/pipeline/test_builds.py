"""Two builds of one model, and workers that leave in the middle: each job ends with its own build's tokens."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from schemas.events import Done, Start
from schemas.handoff import Handoff
from schemas.job import Sampling, job_digest, parse_job
from schemas.subjects import Lane, Stage, derived_seed, stream_name
from schemas.wire import encode
from services.bus.chain import append
from services.bus.connection import Bus
from services.bus.depth import queued_sources
from services.bus.jetstream import call
from services.bus.publish import publish_handoff, submit_job
from services.bus.streams import ensure_streams
from services.models.registry import build_id
from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline
from tests.pipeline.test_mixed_builds import mixed
from tests.pipeline.tiny import tiny_files, tiny_model


async def begin(bus: Bus, slug: str, job: dict[str, Any], build: str) -> None:
    """Queues a job that a prefill worker of `build` has taken and announced, and then lost."""
    data = encode(job)
    origin = await (await submit_job(bus, "default", slug, Lane.INTERACTIVE, data)).origin(bus)
    start = Start(
        job=job["id"], origin=origin, digest=job_digest(parse_job(data)), build=build,
        seed=derived_seed("default", job["id"]), prompt_tokens=len(job["prompt_token_ids"]), cached_tokens=0,
    )  # fmt: skip
    assert await append(bus, "default", job["id"], [start], last=0, claim="prefill.0.1")


async def test_a_job_ends_on_the_build_that_began_it(broker: str, tmp_path: Path):
    """Whichever prefill worker gets it: jobs of the other build wait for that one's workers, or go to their queue.

    Log-probabilities tell the builds apart where their tokens are the same.
    """
    files = tiny_files()
    plain = {
        name: {"prompt_token_ids": prompt, "temperature": 0.0, "max_tokens": 6, "logprobs": 1}
        for name, prompt in {"short": [5, 6, 7], "of three blocks": list(range(3, 53))}.items()
    }
    builds = {dtype: build_id(files, tiny_model(dtype).arithmetic.id) for dtype in ("float32", "bfloat16")}
    expected, found = {}, {}
    async with await Bus.connect(broker, "client") as bus:
        await ensure_streams(bus, files.slug)
        for dtype, build in builds.items():
            for name in plain:
                await begin(bus, files.slug, {**plain[name], "id": job_of(dtype, name)}, build)

    def pipeline(dtype: str) -> AbstractAsyncContextManager[LocalPipeline]:
        return mixed(broker, tmp_path, dtype, dtype)

    async with pipeline("float32") as first:
        for name in plain:
            found["float32", name] = await first.read(job_of("float32", name))
            expected["float32", name] = await first.ask(**plain[name])
        async with pipeline("bfloat16") as second:
            for name in plain:
                found["bfloat16", name] = await second.read(job_of("bfloat16", name))
    async with pipeline("bfloat16") as second:
        for name in plain:
            expected["bfloat16", name] = await second.ask(**plain[name])
    for (dtype, name), answer in found.items():
        assert answer.start.build == expected[dtype, name].start.build == builds[dtype]
        assert isinstance(answer.end, Done), answer.end
        assert answer.essence == expected[dtype, name].essence, (dtype, name)
    assert all(expected["float32", name].essence != expected["bfloat16", name].essence for name in plain)


def job_of(dtype: str, name: str) -> str:
    return f"{dtype}-{name.replace(' ', '-')}"


def draft(pipeline: LocalPipeline, name: str, job: str) -> Handoff:
    return Handoff(
        tenant="default", job=job, origin="1-1", digest="d", build=pipeline.decode.build, hop=4, last=0,
        timeout_left_s=600.0, prompt_token_ids=GOLDENS[name].prompt_token_ids, first=[], stored_blocks=0,
        sampling=Sampling(temperature=0, max_tokens=8, ignore_eos=True, seed=1, n=2), cached_tokens=0, reworked=True,
    )  # fmt: skip


async def test_decode_can_do_all_of_a_job_when_its_prefill_workers_are_gone(pipelines: Pipelines):
    """No token was made, and no block is stored."""
    async with pipelines() as pipeline:
        await publish_handoff(pipeline.bus, draft(pipeline, "65 tokens", "alone"), pipeline.text.slug, Lane.BATCH)
        answer = await pipeline.read("alone")
        assert isinstance(answer.end, Done)
        for choice in (0, 1):
            assert answer.token_ids(choice) == GOLDENS["65 tokens"].token_ids[:8]


async def test_a_prompt_that_is_not_done_in_time_goes_back_with_its_blocks(pipelines: Pipelines, tmp_path: Path):
    """The prefill worker is told to go in the middle of a prompt, with little grace."""
    prompt = [token for golden in GOLDENS.values() for token in golden.prompt_token_ids][:640]
    job = {"prompt_token_ids": prompt, "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    quick = {"grace_s": 0.3, "chunk_tokens": 64}
    async with pipelines(data_dir=tmp_path / "reference") as pipeline:
        reference = await pipeline.ask(**job)
    async with pipelines(scheduler=quick) as pipeline:
        rework = stream_name(Stage.REWORK, pipeline.text.slug)
        before = await num_published(pipeline, rework)
        name = await pipeline.submit(**job)
        async with asyncio.timeout(60):
            while not pipeline.prefill.store.counters.writes:
                await asyncio.sleep(0.001)
    async with pipelines() as pipeline:
        assert await num_published(pipeline, rework) == before + 1
        answer = await pipeline.read(name)
        assert answer.essence == reference.essence
        assert pipeline.prefill.store.counters.hits >= 1, "what was computed was stored"
        assert await queued_sources(pipeline.bus, Stage.REWORK, pipeline.text.slug) == []


async def num_published(pipeline: LocalPipeline, stream: str) -> int:
    return int((await call(pipeline.bus, f"STREAM.INFO.{stream}"))["state"]["last_seq"])
