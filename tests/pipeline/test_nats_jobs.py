"""Jobs from plain NATS clients: good ones are answered, bad ones get an error at first sight, and repeats run once."""

import asyncio
import json
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.errors import NoStreamResponseError

from schemas.events import Done, Error, Finish
from schemas.subjects import DEAD_STREAM, Stage, derived_job_id, derived_seed, stream_name
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

SUBJECT = "kvrelay.prefill.default.smollm2-135m-instruct.interactive"
FRANCE = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}


async def read_plainly(nc: Client, job: str) -> list[dict[str, Any]]:
    """All events of a job, as ten lines of anybody's code read them."""
    subscription = await nc.jetstream().subscribe(f"kvrelay.replies.default.{job}", ordered_consumer=True)
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("done", "error"):
        message = await subscription.next_msg(timeout=60)
        events += [json.loads(line) for line in message.data.splitlines()]
    await subscription.unsubscribe()
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] in ("token", "finish"))


async def test_a_plain_client_is_answered_and_a_late_reader_sees_it_all(pipelines: Pipelines):
    async with pipelines() as pipeline, await nats.connect(pipeline.url) as nc:
        await nc.jetstream().publish(SUBJECT, json.dumps({"id": "plain-1", **FRANCE}).encode())
        events = await read_plainly(nc, "plain-1")
        assert text_of(events) == "The capital of France is Paris."
        assert [event["type"] for event in events] == ["start", *["token"] * 8, "finish", "done"]
        assert await read_plainly(nc, "plain-1") == events, "whoever comes after the end replays the whole stream"


async def test_an_id_and_a_seed_are_derived_from_the_message(pipelines: Pipelines):
    async with pipelines() as pipeline, await nats.connect(pipeline.url) as nc:
        ack = await nc.jetstream().publish(SUBJECT, b'{"prompt": "Once upon a time", "max_tokens": 5}')
        info = await nc.jetstream().stream_info(stream_name(Stage.PREFILL, pipeline.text.slug))
        job = derived_job_id(ack.seq, int(info.created.timestamp() * 1000))
        events = await read_plainly(nc, job)
        assert events[0]["seed"] == derived_seed("default", job)
        assert events[0]["job"] == job and len(events) == 8


async def test_a_repeat_runs_once_and_another_job_of_that_id_is_refused(pipelines: Pipelines):
    async with pipelines() as pipeline, await nats.connect(pipeline.url) as nc:
        js = nc.jetstream()
        body = {"id": "repeat", "prompt": "One, two,", "max_tokens": 6, "seed": 1}
        await js.publish(SUBJECT, json.dumps(body).encode())
        events = await read_plainly(nc, "repeat")
        dead = (await js.stream_info(DEAD_STREAM)).state.messages
        await js.publish(SUBJECT, json.dumps(body).encode())
        await js.publish(SUBJECT, json.dumps({**body, "max_tokens": 7}).encode())
        await pipeline.ask(prompt="barrier", max_tokens=1)
        await queue_is_empty(js, pipeline)
        assert await read_plainly(nc, "repeat") == events
        assert (await js.stream_info(DEAD_STREAM)).state.messages == dead + 1, "the conflict is kept for the operator"


async def queue_is_empty(js: Any, pipeline: LocalPipeline) -> None:
    async with asyncio.timeout(30):
        while (await js.stream_info(stream_name(Stage.PREFILL, pipeline.text.slug))).state.messages:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("payload", "code", "param"),
    [
        (b'{"id":"ID","a":1, x}', "invalid_request", None),
        (b'{"id":"ID","prompt":""}', "invalid_request", "prompt"),
        (b'{"id":"ID","prompt_token_ids":[]}', "invalid_request", "prompt_token_ids"),
        (b'{"id":"ID","prompt_token_ids":[49152]}', "invalid_request", "prompt_token_ids"),
        (b'{"id":"ID","prompt":"a","max_tokens":"5"}', "invalid_request", "max_tokens"),
        (b'{"id":"ID","prompt":"a","max_token":5}', "invalid_request", "max_token"),
        (b'{"id":"ID","prompt":"a","logit_bias":{"49152":1}}', "invalid_request", "logit_bias"),
        (b'{"id":"ID","prompt":"a","n":17,"max_tokens":5}', "invalid_request", "n"),
        (b'{"id":"ID","prompt":"\\ud83d"}', "invalid_request", "prompt"),
        (b'{"id":"ID","prompt":"a","model":"another"}', "model_not_found", "model"),
        (b'{"id":"ID","v":2,"prompt":"a"}', "unsupported_version", "v"),
        (json.dumps({"id": "ID", "prompt": "word " * 9000}).encode(), "context_length_exceeded", "prompt"),
        (json.dumps({"id": "ID", "prompt": "a" * 1_000_000}).encode(), "context_length_exceeded", "prompt"),
    ],
)
async def test_bad_jobs_end_with_an_error_at_first_sight(
    pipelines: Pipelines, payload: bytes, code: str, param: str | None, request: pytest.FixtureRequest
):
    job = f"bad-{abs(hash(request.node.name))}"
    async with pipelines() as pipeline, await nats.connect(pipeline.url) as nc:
        ack = await nc.jetstream().publish(SUBJECT, payload.replace(b"ID", job.encode()))
        if b", x}" in payload:  # its id cannot be read, so it is named by its place in the queue
            info = await nc.jetstream().stream_info(stream_name(Stage.PREFILL, pipeline.text.slug))
            job = derived_job_id(ack.seq, int(info.created.timestamp() * 1000))
        (event,) = await read_plainly(nc, job)
        assert (event["type"], event["code"], event.get("param")) == ("error", code, param)
        answer = await pipeline.ask(prompt="Still alive?", max_tokens=2)
        assert isinstance(answer.end, Done)


async def test_unknown_models_and_lanes_have_no_responder(pipelines: Pipelines):
    async with pipelines() as pipeline, await nats.connect(pipeline.url) as nc:
        for subject in (SUBJECT.replace("smollm2", "other"), SUBJECT.replace("interactive", "fast")):
            with pytest.raises(NoStreamResponseError):
                await nc.jetstream().publish(subject, b"{}")


async def test_deadlines_end_as_errors(pipelines: Pipelines):
    async with pipelines() as pipeline:
        answer = await pipeline.ask(prompt="Once", max_tokens=8000, ignore_eos=True, timeout_s=4.0)
        assert isinstance(answer.end, Error) and answer.end.code == "deadline_exceeded"
        assert answer.token_ids() and not any(isinstance(event, Finish) for event in answer.events)
        answer = await pipeline.ask(prompt="Once", ttft_timeout_s=1e-6)
        assert isinstance(answer.end, Error) and answer.end.code == "deadline_exceeded"
        assert not answer.token_ids()
        async with asyncio.timeout(30):
            while pipeline.decode.pool.num_held or pipeline.prefill.pool.num_held:
                await asyncio.sleep(0.02)
