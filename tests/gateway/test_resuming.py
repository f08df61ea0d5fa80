"""Streams that go on where they stopped: after a cut, through another gateway, after a restart; and retries."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.events import Error
from services.bus.connection import Bus
from services.bus.history import read_all
from services.gateway.gateway import Gateway
from services.settings import Settings
from tests.gateway.conftest import API, BUS, MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, ending, saying, token
from tests.gateway.sse import SseEvent, events
from tests.gateway.tiny_model import tiny_text

TEXTS = ["Hel", "", "lo", " 世", "界", "", " 👋", "!", " and", " so", " on"]


@contextlib.asynccontextmanager
async def another_gateway(pipeline: Pipeline, server_url: str) -> AsyncIterator[Gateway]:
    async with await Bus.connect(server_url, f"other-{pipeline.model}", BUS) as bus:
        settings = Settings(api=API, bus=BUS)
        gateway = Gateway(settings, bus, bus.name, {pipeline.model: tiny_text(pipeline.model)})
        await gateway.start()
        try:
            await gateway.readiness.check(pipeline.model, 5.0)
            yield gateway
        finally:
            await gateway.close()


def text_of(found: list[SseEvent]) -> str:
    chunks = [json.loads(event.data) for event in found if event.data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def resumed(pipeline: Pipeline, url: str, name: str, last_id: str) -> list[SseEvent]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with pipeline.session.get(f"{url}/v1/requests/{name}/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        return [event async for event in events(response)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_from_every_event_on(pipeline: Pipeline, n: int, path: str) -> None:
    pipeline.worker.script = saying(*TEXTS, held_back=" end")
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": n}
    body = pipeline.chat(**options) if "chat" in path else {"model": pipeline.model, "prompt": ["a", "b"], **options}
    async with pipeline.post(body, path) as response:
        whole = [event async for event in events(response)]
        place = response.headers["Content-Location"]
    assert whole[-1].data == "[DONE]" and len({event.id for event in whole}) == len(whole)
    name = place.split("/")[3]
    assert await resumed(pipeline, pipeline.url, name, "") == whole or "chat" not in path
    for number, event in enumerate(whole[:-1]):
        rest = await resumed(pipeline, pipeline.url, name, event.id)
        if "chat" in path:
            assert rest == whole[number + 1 :]
        else:  # two jobs: their events may come in another order, and are still each of them once
            assert sorted(e.data for e in rest) == sorted(e.data for e in whole[number + 1 :])
    async with pipeline.session.get(pipeline.url + place, headers={"Last-Event-ID": whole[-1].id}) as response:
        assert response.status == 204, "an EventSource would come again for ever"


async def test_cut_at_ten_random_points(make_pipeline: MakePipeline, server: Any) -> None:
    """Each time through the other gateway, while the worker goes on."""
    pipeline = await make_pipeline(resume_grace_s=30.0)
    rng = random.Random(7)
    texts = [rng.choice(["a", " b", "", "世", " 👋"]) for _ in range(100)]
    steps = asyncio.Semaphore(0)

    async def script(work: Work) -> None:
        await work.say(work.start())
        for index, text in enumerate(texts):
            await steps.acquire()
            await work.say(token(index, text))
        await work.say(*ending(work.job, len(texts)))

    pipeline.worker.script = script
    points = sorted(rng.sample([number for number, text in enumerate(texts, 1) if text][:-1], 10))
    async with another_gateway(pipeline, server.url) as other:
        got: list[SseEvent] = []
        request: Any = pipeline.post(pipeline.chat(stream=True))
        name, given = "", 0
        for number, point in enumerate([*points, len(texts)]):
            async with request as response:
                name = name or response.headers["Content-Location"].split("/")[3]
                for _ in range(point - given):
                    steps.release()
                given = point
                wanted = sum(1 for text in texts[:point] if text) + 1 if point < len(texts) else 10**9
                async for event in events(response):
                    got.append(event)
                    if len(got) == wanted:
                        break
                response.close()
            gateway = other if number % 2 else pipeline.gateway
            headers = {"Last-Event-ID": got[-1].id}
            request = pipeline.session.get(f"{gateway.url}/v1/requests/{name}/events", headers=headers)
        request.close()
    assert text_of(got) == "".join(texts)
    assert got[-1].data == "[DONE]"
    assert len({event.id for event in got}) == len(got)
    assert pipeline.worker.taken.qsize() == 1 and pipeline.worker.cancelled.empty()


async def test_through_another_gateway_when_the_first_has_gone(make_pipeline: MakePipeline, server: Any) -> None:
    pipeline = await make_pipeline()
    go_on = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "before"))
        await go_on.wait()
        await work.say(token(1, " after"), *ending(work.job, 2))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        stream = events(response)
        got = [await anext(stream), await anext(stream)]
        name = response.headers["Content-Location"].split("/")[3]
        await pipeline.gateway.drain(0.0)
        await pipeline.gateway.close()
        last = [event async for event in stream][-1]
    assert last.id == got[-1].id and "shutting down" in last.data
    async with another_gateway(pipeline, server.url) as other:
        resuming = asyncio.create_task(resumed(pipeline, other.url, name, last.id))
        go_on.set()
        assert text_of(got + await resuming) == "before after"
    assert pipeline.worker.taken.qsize() == 1 and pipeline.worker.cancelled.empty()


async def test_a_job_whose_reader_has_gone_to_another_gateway_is_not_cancelled(
    make_pipeline: MakePipeline, server: Any
) -> None:
    pipeline = await make_pipeline(resume_grace_s=0.2)
    go_on = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "a"))
        await go_on.wait()
        await work.say(token(1, "b"), *ending(work.job, 2))

    pipeline.worker.script = script
    async with another_gateway(pipeline, server.url) as other:
        await pipeline.gateway._beats.wait_for(lambda table: len(table.alive("gateway")) >= 2)
        async with pipeline.post(pipeline.chat(stream=True)) as response:
            got = [event async for event in _first(response, 2)]
            name = response.headers["Content-Location"].split("/")[3]
            response.close()
        resuming = asyncio.create_task(resumed(pipeline, other.url, name, got[-1].id))
        while pipeline.gateway.exchange.jobs:  # asked around, and left it to the other
            await asyncio.sleep(0.01)
        go_on.set()
        assert text_of(got + await resuming) == "ab"
    assert pipeline.worker.cancelled.empty()


async def _first(response: Any, number: int) -> AsyncIterator[SseEvent]:
    stream = events(response)
    for _ in range(number):
        yield await anext(stream)


async def test_an_error_is_told_once(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "a"), Error(code="kv_unavailable", message="gone"))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        got = [event async for event in events(response)]
        place = pipeline.url + response.headers["Content-Location"]
    assert json.loads(got[-1].data)["error"]["code"] == "kv_unavailable"
    name = place.split("/")[-2]
    assert (await resumed(pipeline, pipeline.url, name, got[-2].id))[-1] == got[-1]
    async with pipeline.session.get(place, headers={"Last-Event-ID": got[-1].id}) as response:
        assert response.status == 204


@pytest.mark.parametrize("last_id", ["x", "1,2", "5x3", "-1", "1+9", "9" * 5000])
async def test_ids_of_no_event(pipeline: Pipeline, last_id: str) -> None:
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        await response.read()
        place = pipeline.url + response.headers["Content-Location"]
    async with pipeline.session.get(place, headers={"Last-Event-ID": last_id}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_with_one_key_runs_once(pipeline: Pipeline, stream: bool) -> None:
    pipeline.worker.script = saying("once")
    headers = {"Idempotency-Key": f"order {pipeline.model}!".replace(" ", "-")}
    ids = set()
    for again in (False, stream, True):
        body = pipeline.chat(stream=again)
        async with pipeline.session.post(f"{pipeline.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            ids.add(response.headers["X-Request-Id"])
            if again:
                assert text_of([event async for event in events(response)]) == "once"
            else:
                assert (await response.json())["choices"][0]["message"]["content"] == "once"
    assert pipeline.worker.taken.qsize() == 1 and len(ids) == 1
    other = pipeline.session.post(f"{pipeline.url}/v1/chat/completions", json=pipeline.chat("other"), headers=headers)
    async with other as response:
        assert response.status == 409
        assert (await response.json())["error"]["code"] == "id_conflict"
    assert pipeline.worker.taken.qsize() == 1


async def test_retries_at_the_same_time_run_once(pipeline: Pipeline) -> None:
    headers = {"Idempotency-Key": pipeline.model}

    async def ask() -> Any:
        url = f"{pipeline.url}/v1/chat/completions"
        async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
            return await response.json()

    answers = await asyncio.gather(*(ask() for _ in range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert pipeline.worker.taken.qsize() == 1


async def test_a_retry_after_a_retryable_error_runs_again(pipeline: Pipeline) -> None:
    async def fail(work: Work) -> None:
        await work.say(work.start(), Error(code="kv_unavailable", message="gone"))

    url, headers = f"{pipeline.url}/v1/chat/completions", {"Idempotency-Key": pipeline.model}
    pipeline.worker.script = fail
    async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
        assert response.status == 503
    pipeline.worker.script = saying("well")
    async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
        answer = await response.json()
        assert response.status == 200
    assert answer["id"].endswith("-r1")
    async with pipeline.session.get(f"{pipeline.url}/v1/requests/{answer['id']}/answer") as response:
        assert await response.json() == answer


async def test_submit_and_poll(pipeline: Pipeline) -> None:
    go_on = asyncio.Event()

    async def script(work: Work) -> None:
        await go_on.wait()
        await saying("here")(work)

    pipeline.worker.script = script
    url, headers = f"{pipeline.url}/v1/chat/completions", {"Prefer": "respond-async, wait=1"}
    async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
        assert response.status == 202
        told = await response.json()
        assert response.headers["Location"] == f"/v1/requests/{told['id']}"
    work = await pipeline.worker.taken.get()
    assert (work.job.owner, work.job.on_disconnect) == (None, "continue")
    async with pipeline.session.get(pipeline.url + told["answer"]) as response:
        assert response.status == 202
    async with pipeline.session.get(pipeline.url + told["answer"] + "?wait_s=0.05") as response:
        assert response.status == 202
    waiting = asyncio.create_task(pipeline.session.get(pipeline.url + told["answer"] + "?wait_s=30").__aenter__())
    go_on.set()
    async with await waiting as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "here"
    assert pipeline.worker.cancelled.empty()


async def test_delete(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start())
        await work.lost.wait()

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        await anext(events(response))
        place = pipeline.url + f"/v1/requests/{response.headers['X-Request-Id']}"
        async with pipeline.session.delete(place) as deleted:
            assert deleted.status == 200
            assert (await deleted.json())["state"] == "cancelled"
        assert '"cancelled"' in await response.text()
    work = await pipeline.worker.taken.get()
    assert await pipeline.worker.cancelled.get() == work.job.id
    async with pipeline.session.delete(place) as deleted:
        assert (await deleted.json())["state"] == "cancelled"
    async with pipeline.session.delete(f"{pipeline.url}/v1/requests/nothing") as deleted:
        assert deleted.status == 404
    stored = await read_all(pipeline.bus, "default", str(work.job.id))
    assert [event.code for message in stored for event in message.events if isinstance(event, Error)] == ["cancelled"]
