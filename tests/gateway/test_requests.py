"""`GET /v1/requests/{id}`: every id that a client sees leads to the state of its request."""

import asyncio
from typing import Any

import pytest

from schemas.errors import BusUnavailable, Poisoned
from services.bus.chain import fail_job, open_job
from services.gateway import exchange
from services.openai.request_names import MAX_REMEMBERED, RequestNames
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, ending, token


async def told(pipeline: Pipeline, name: str, status: int = 200) -> dict[str, Any]:
    async with pipeline.session.get(f"{pipeline.url}/v1/requests/{name}") as response:
        assert response.status == status, await response.text()
        assert response.content_type == "application/json"
        found: dict[str, Any] = await response.json()
        return found


async def test_the_ids_that_a_client_sees(pipeline: Pipeline) -> None:
    async with pipeline.post(pipeline.chat(n=2)) as response:
        request_id, answer = response.headers["X-Request-Id"], await response.json()
    work = await pipeline.worker.taken.get()
    reports = [await told(pipeline, name) for name in (request_id, answer["id"], work.job.id)]
    assert reports[0] == reports[1] == reports[2]
    report = reports[0]
    assert (report["state"], report["id"], report["tenant"]) == ("done", work.job.id, "default")
    assert [choice["tokens"] for choice in report["choices"]] == [3, 3]
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert report["model"] == pipeline.model and report["worker"] == f"worker-{pipeline.model}"


async def test_an_id_of_the_client_s_own(pipeline: Pipeline) -> None:
    for _ in range(2):
        own = {"X-Request-Id": "order:66.a"}
        async with pipeline.session.post(
            f"{pipeline.url}/v1/chat/completions", json=pipeline.chat(), headers=own
        ) as response:
            answer = await response.json()
        assert await told(pipeline, own["X-Request-Id"]) == await told(pipeline, answer["id"])


async def test_the_states_of_a_request_while_it_goes_on(pipeline: Pipeline) -> None:
    go_on = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start())
        await go_on.wait()
        await work.say(token(0, "x"), *ending(work.job, 1))

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        await response.content.readany()
        name = response.headers["X-Request-Id"]
        report = await told(pipeline, name)
        assert (report["state"], report["choices"], report["error"]) == ("prefilling", [], None)
        go_on.set()
        await response.read()
    assert (await told(pipeline, name))["state"] == "done"


async def test_a_queued_request(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=False)
    asking = asyncio.create_task(pipeline.post(pipeline.chat(timeout_s=1.0)).__aenter__())
    while not pipeline.gateway.exchange.jobs:
        await asyncio.sleep(0.01)
    ((_, job),) = pipeline.gateway.exchange.jobs
    assert (await told(pipeline, job.replace("req-", "chatcmpl-")))["state"] == "queued"
    (await asking).close()
    report = await told(pipeline, job)
    assert (report["state"], report["error"]["code"]) == ("failed", "deadline_exceeded")


async def test_a_request_whose_acceptance_nobody_confirmed_does_not_stay_queued(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stored_but_unanswered(*arguments: Any) -> int | None:
        await open_job(*arguments)
        raise BusUnavailable("NATS did not answer in time")

    monkeypatch.setattr(exchange, "open_job", stored_but_unanswered)
    async with pipeline.post(pipeline.chat()) as response:
        assert response.status == 503
        name = response.headers["X-Request-Id"]
    while pipeline.gateway.exchange.jobs:
        await asyncio.sleep(0.01)
    assert (await told(pipeline, name))["state"] == "failed"


async def test_a_request_with_several_prompts(pipeline: Pipeline) -> None:
    body = {"model": pipeline.model, "prompt": ["a", "b", "c"]}
    async with pipeline.post(body, "/v1/completions") as response:
        answer = await response.json()
    report = await told(pipeline, answer["id"])
    assert (report["id"], report["state"], len(report["jobs"])) == (answer["id"], "done", 3)
    assert report["jobs"][1] == await told(pipeline, report["jobs"][1]["id"])


async def test_a_job_that_came_over_nats(pipeline: Pipeline) -> None:
    await fail_job(pipeline.bus, "default", f"mine-{pipeline.model}", Poisoned("no"))
    await fail_job(pipeline.bus, "acme", f"theirs-{pipeline.model}", Poisoned("no"))
    report = await told(pipeline, f"mine-{pipeline.model}")
    assert (report["state"], report["error"]) == ("failed", {"code": "poisoned", "message": "no", "param": None})
    await told(pipeline, f"theirs-{pipeline.model}", status=404)


@pytest.mark.parametrize("name", ["nothing", "chatcmpl-" + "0" * 24, "a%20b%3E*", "x" * 500, "%F0%9F%92%A9"])
async def test_what_nobody_knows_is_not_found(pipeline: Pipeline, name: str) -> None:
    error = (await told(pipeline, name, status=404))["error"]
    assert error["code"] == "not_found" and error["type"] == "invalid_request_error"


def test_the_latest_names_are_remembered() -> None:
    names = RequestNames()
    for number in range(MAX_REMEMBERED + 1):
        names.remember("acme", f"name {number}", f"{number:024x}")
    names.remember("acme", "name 5", "f" * 24)
    assert names.job_ids("acme", "name 0") == []
    assert names.job_ids("other", "name 1") == []
    assert names.job_ids("acme", "name 1") == [f"req-{1:024x}"]
    assert names.job_ids("acme", "name 5") == ["req-" + "f" * 24]
