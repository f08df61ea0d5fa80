"""What workers give up is there for the operator, once, and can be published again."""

import asyncio

from schemas.errors import Poisoned
from schemas.events import Done, Error
from schemas.job import parse_job
from schemas.subjects import Lane, decode_subject, prefill_subject
from schemas.wire import encode
from services.bus.burial import GivenUp, bury
from services.bus.dead_letters import DeadLetter, dead_letters, payload_of
from services.bus.dead_retry import retry
from services.bus.publish import submit_job
from services.prefill.request import draft_handoff
from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

JUNK = [b'{"id": "junk", x}', b"\xff\xfe\x00", b"[1]", b'"junk"', b""]
GOLDEN = GOLDENS["rain for the clerk"]


async def letters(pipeline: LocalPipeline) -> list[DeadLetter]:
    return [letter async for letter in dead_letters(pipeline.bus)]


async def publish(pipeline: LocalPipeline, payload: bytes) -> str:
    """The job's id if it does not say one."""
    submitted = await submit_job(pipeline.bus, "default", pipeline.text.slug, Lane.INTERACTIVE, payload)
    return await submitted.origin(pipeline.bus)


async def test_what_nobody_can_read_ends_at_first_sight_and_is_kept(pipelines: Pipelines):
    async with pipelines() as pipeline:
        before = len(await letters(pipeline))
        junk = {await publish(pipeline, payload): payload for payload in JUNK}
        await publish(pipeline, b'{"id": "newer", "v": 2, "prompt": "x"}')
        await publish(pipeline, b'{"id": "mendable", "prompt": ""}')
        decode = decode_subject(pipeline.text.slug, pipeline.decode.build, Lane.INTERACTIVE)
        await pipeline.bus.request(decode, b'{"tenant": "default", "job": "no-handoff"}')
        codes = {"newer": "unsupported_version", "no-handoff": "invalid_request"}
        codes |= dict.fromkeys(junk, "invalid_request")
        for job, code in {**codes, "mendable": "invalid_request"}.items():
            (end,) = (await pipeline.read(job)).events
            assert isinstance(end, Error) and end.code == code
        async with asyncio.timeout(30):
            while len(found := (await letters(pipeline))[before:]) < len(codes):
                await asyncio.sleep(0.01)
        assert {letter.job: letter.code for letter in found} == codes, "its publisher can mend the other, and was told"
        assert {letter.num_delivered for letter in found} == {1}
        kept = {letter.job: await payload_of(pipeline.bus, letter) for letter in found}
        assert {job: kept[job] for job in junk} == junk


async def test_a_dead_job_and_a_dead_handoff_give_the_tokens_that_they_owed(pipelines: Pipelines):
    async with pipelines() as pipeline:
        slug, build = pipeline.text.slug, pipeline.decode.build
        body = encode({"id": "dead-job", **GOLDEN.job(max_tokens=6)})
        draft = draft_handoff(
            parse_job(body), tenant="default", job_id="dead-job", origin="1-1", published_at=0.0, build=build,
            text=pipeline.text,
        )  # fmt: skip
        given_up = [
            GivenUp(body, prefill_subject("default", slug, Lane.INTERACTIVE), "1-1", 5),
            GivenUp(encode(draft), decode_subject(slug, build, Lane.INTERACTIVE), "2-1", 5),
        ]
        for message in given_up:
            await bury(pipeline.bus, "default", "dead-job", message, Poisoned("three times"))
        dead = [letter async for letter in dead_letters(pipeline.bus, job="dead-job")]
        for letter, new_id in zip(dead, ["dead-job-r1", "dead-job-r2"], strict=True):
            assert await retry(pipeline.bus, letter) == new_id
            answer = await pipeline.read(new_id)
            assert isinstance(answer.end, Done) and answer.token_ids() == GOLDEN.token_ids[:6]
        assert [letter async for letter in dead_letters(pipeline.bus, job="dead-job")] == []
