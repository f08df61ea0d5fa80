"""Requests that go wrong after they were accepted: workers that fail or fall silent, clients that leave or stall."""

import asyncio
import json
import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.beat import Beat
from schemas.errors import KvrelayError
from schemas.events import Error
from services.bus.history import read_all
from services.gateway.catalog import Catalog
from services.gateway.exchange import Exchange
from services.gateway.open_job import OpenJob
from services.gateway.readiness import Readiness
from services.gateway.reaper import Reaper
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, saying, token
from tests.gateway.sse import parse


async def endless(work: Work) -> None:
    """A token whenever the last one is stored, until somebody ends the job."""
    await work.say(work.start())
    for index in range(1_000_000):
        await work.say(token(index, "x" * 100))
        await asyncio.sleep(0.001)


async def silent(work: Work) -> None:
    await work.lost.wait()


async def ended(pipeline: Pipeline, job: str) -> Error:
    """The end of a job that was given up; fails if it has another, or none."""
    events = [event for stored in await read_all(pipeline.bus, "default", job) for event in stored.events]
    assert isinstance(events[-1], Error)
    return events[-1]


async def connected(pipeline: Pipeline, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
    """A plain socket on which `body` was posted."""
    data = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}"])
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    host, port = pipeline.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + b"\r\n\r\n" + data)
    return client


async def no_open_jobs(pipeline: Pipeline) -> None:
    while pipeline.gateway.exchange.jobs:
        await asyncio.sleep(0.01)


async def test_an_error_in_the_middle_of_a_stream(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), *(token(i, "x") for i in range(5)))
        await work.say(Error(code="kv_unavailable", message="the blocks are gone"))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        assert response.status == 200
        text = await response.text()
    events = [json.loads(event.data) for event in parse(text)]
    assert sum(e["choices"][0]["delta"].get("content") == "x" for e in events[:-1]) == 5
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert events[-1]["error"]["code"] == "kv_unavailable"
    assert "[DONE]" not in text


async def test_a_failed_stream_closes_its_connection(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), Error(code="internal", message="no"))

    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat(stream=True))
    found = b""
    while part := await asyncio.get_running_loop().sock_recv(client, 65536):
        found += part
    client.close()
    assert b'"code":"internal"' in found


async def test_an_error_after_a_token_of_a_whole_answer_has_its_status(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "x"), Error(code="kv_unavailable", message="gone"))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat()) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "kv_unavailable"


@pytest.mark.parametrize("fields", [{"timeout_s": 0.2}, {"ttft_timeout_s": 0.2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline(pipeline: Pipeline, fields: dict[str, Any], stream: bool) -> None:
    pipeline.worker.script = silent
    async with pipeline.post(pipeline.chat(stream=stream, **fields)) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"
    work = await pipeline.worker.taken.get()
    assert work.job.id is not None
    assert (await ended(pipeline, work.job.id)).code == "deadline_exceeded"
    assert await pipeline.worker.cancelled.get() == work.job.id
    await no_open_jobs(pipeline)


async def test_a_deadline_after_a_comment_is_an_error_event(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(keepalive_s=0.05)
    pipeline.worker.script = silent
    async with pipeline.post(pipeline.chat(stream=True, timeout_s=0.3)) as response:
        assert response.status == 200
        text = await response.text()
    assert text.startswith(": keep-alive\n")
    assert '"deadline_exceeded"' in text
    assert "[DONE]" not in text


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [endless, silent])
async def test_a_client_that_leaves(pipeline: Pipeline, how: str, stream: bool, script: Any) -> None:
    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat(stream=stream))
    work = await pipeline.worker.taken.get()
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert await pipeline.worker.cancelled.get() == work.job.id
    assert (await ended(pipeline, str(work.job.id))).code == "cancelled"
    await no_open_jobs(pipeline)


async def test_a_client_that_leaves_while_its_job_is_queued(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=False)
    client = await connected(pipeline, pipeline.chat())
    while not pipeline.gateway.exchange.jobs:
        await asyncio.sleep(0.01)
    client.close()
    job = await pipeline.worker.cancelled.get()
    assert (await ended(pipeline, job)).code == "cancelled"


async def test_a_job_outlives_its_client_by_the_grace(make_pipeline: MakePipeline) -> None:
    """Long enough, here, for it to end by itself."""
    pipeline = await make_pipeline(resume_grace_s=1.0)
    released = asyncio.Event()

    async def script(work: Work) -> None:
        await released.wait()
        await saying("done")(work)

    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat())
    work = await pipeline.worker.taken.get()
    client.close()
    while pipeline.gateway._generation.num_open:
        await asyncio.sleep(0.01)
    released.set()
    await no_open_jobs(pipeline)
    (*_, last) = [e for s in await read_all(pipeline.bus, "default", str(work.job.id)) for e in s.events]
    assert not isinstance(last, Error)


async def test_a_half_close_is_no_disconnect(pipeline: Pipeline) -> None:
    released = asyncio.Event()

    async def script(work: Work) -> None:
        await released.wait()
        await saying("still here")(work)

    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat())
    client.shutdown(socket.SHUT_WR)
    loop = asyncio.get_running_loop()
    found = await loop.sock_recv(client, 65536)  # a probe: the end of file was noticed
    released.set()
    while part := await loop.sock_recv(client, 65536):
        found += part
    client.close()
    assert b"still here" in found
    assert pipeline.worker.cancelled.empty()


async def test_a_stalled_reader_loses_its_own_stream_only(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(write_timeout_s=0.3, stream_buffer_bytes=4096, resume_grace_s=60.0)

    async def script(work: Work) -> None:
        await (endless if work.job.max_tokens is None else saying(*["x"] * 20))(work)

    pipeline.worker.script = script
    client = await connected(pipeline, pipeline.chat(stream=True), receive_bytes=4096)
    work = await pipeline.worker.taken.get()
    while pipeline.worker.cancelled.empty():
        async with pipeline.post(pipeline.chat(stream=True, max_tokens=20)) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
    assert await pipeline.worker.cancelled.get() == work.job.id
    assert (await ended(pipeline, str(work.job.id))).code == "cancelled"
    client.close()


async def test_draining(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline()
    released = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start())
        await released.wait()
        await saying("finished")(work)

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        draining = asyncio.create_task(pipeline.gateway.drain(30.0))
        await asyncio.sleep(0)
        async with pipeline.session.get(pipeline.url + "/ready") as ready:
            assert ready.status == 503
            assert (await ready.json())["state"] == "draining"
        async with pipeline.post(pipeline.chat()) as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"]
        assert not draining.done()
        released.set()
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await draining


async def test_a_whole_answer_that_does_not_come_in_the_grace_is_ended_by_us(pipeline: Pipeline) -> None:
    pipeline.worker.script = endless
    asking = asyncio.create_task(pipeline.post(pipeline.chat()).__aenter__())
    work = await pipeline.worker.taken.get()
    await pipeline.gateway.drain(0.0)
    await pipeline.gateway.close()
    async with await asking as response:
        assert response.status == 503
        assert "shutting down" in await response.text()
    assert (await ended(pipeline, str(work.job.id))).code == "no_worker"


async def test_a_stream_that_does_not_end_in_the_grace_may_go_on_elsewhere(pipeline: Pipeline) -> None:
    pipeline.worker.script = endless
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        begun = b""
        while b"\n\n" not in begun:  # where an event ends; comments are single lines
            begun += await response.content.readany()
        await pipeline.gateway.drain(0.0)
        await pipeline.gateway.close()
        text = (begun + await response.content.read()).decode()
    *_, before, last = parse(text)
    assert "shutting down" in json.loads(last.data)["error"]["message"]
    assert last.id == before.id, "nothing of the answer was given with it"
    assert pipeline.worker.cancelled.empty()


class NoBuilds(Readiness):
    def __init__(self) -> None:
        pass

    def can_end(self, slug: str, build: str, has_token: bool) -> bool:
        return build == "alive"


class Endings(Exchange):
    def __init__(self, *jobs: OpenJob) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.ends: dict[str, str] = {}

    def end(self, job: OpenJob, error: KvrelayError) -> None:
        job.is_ending = True
        self.ends[job.id] = error.code


def open_job(name: str, build: str) -> OpenJob:
    return OpenJob(
        tenant="default",
        id=name,
        model="m",
        deadline_s=3600.0,
        first_token_deadline_s=None,
        build=build,
    )


def test_jobs_of_a_build_that_is_gone_are_ended_after_a_while() -> None:
    exchange = Endings(open_job("a", "alive"), open_job("b", "dead"), open_job("c", ""))
    reaper = Reaper(exchange, NoBuilds(), silent_after_s=60.0)
    reaper.reap(100.0)
    reaper.reap(159.0)
    assert exchange.ends == {}
    reaper.reap(160.0)
    assert exchange.ends == {"b": "build_gone", "c": "no_worker"}


def test_silence_is_counted_anew_after_a_sign_of_life() -> None:
    job = open_job("a", "dead")
    exchange = Endings(job)
    reaper = Reaper(exchange, NoBuilds(), silent_after_s=60.0)
    reaper.reap(100.0)
    job.build = "alive"
    reaper.reap(150.0)
    job.build = "dead"
    reaper.reap(170.0)
    assert exchange.ends == {}


@pytest.mark.parametrize(
    ("alive", "begun", "has_token", "expected"),
    [
        ("prefill:old decode:old", "old", False, True),
        ("prefill:new decode:old", "old", False, True),  # another build's prefill passes it on
        ("decode:old", "old", True, True),  # the old prefill workers went first
        ("decode:old", "old", False, False),
        ("prefill:old decode:new", "old", True, False),
        ("prefill:new decode:new", "", False, True),
        ("prefill:new", "", False, False),
        ("", "old", True, False),
    ],
)
def test_who_can_end_a_job(alive: str, begun: str, has_token: bool, expected: bool) -> None:
    beats = []
    for worker in alive.split():
        role, _, build = worker.partition(":")
        beats.append(Beat(process=worker, role=role, state="draining", model="m", build=build))  # type: ignore[arg-type]
    table: Any = SimpleNamespace(alive=lambda: beats)
    bus: Any = SimpleNamespace(connected=True)
    readiness = Readiness(bus, table, Catalog({}))
    assert readiness.can_end("m", begun, has_token) is expected
    bus.connected = False
    assert readiness.can_end("m", begun, has_token)
