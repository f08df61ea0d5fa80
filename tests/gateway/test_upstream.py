"""Moving over bit by bit: what another gateway answers in place of this one, and what both answer."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from schemas.errors import SetupError
from services import telemetry
from services.gateway.aliases import Target, parse_aliases
from services.gateway.course import SERVE_HEADER, SERVED_BY_HEADER
from services.settings import Settings
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, saying, token
from tests.gateway.sse import parse

THEIRS = ("from", " the", " other")


@contextlib.asynccontextmanager
async def small_upstream(answer: Any) -> AsyncIterator[str]:
    """A server whose every request is answered by `answer(request)`."""
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def other(make_pipeline: MakePipeline) -> Pipeline:
    """What the upstream is: a gateway with a worker and a model of its own."""
    made = await make_pipeline()
    made.worker.script = saying(*THEIRS)
    return made


async def text_of(response: aiohttp.ClientResponse) -> tuple[str, str]:
    """What a whole chat says, and who said it."""
    assert response.status == 200, await response.text()
    body = await response.json()
    return body["choices"][0]["message"]["content"], response.headers.get(SERVED_BY_HEADER, "here")


@pytest.mark.parametrize("path", ["/v1", ""])
async def test_a_share_of_all_is_answered_there(make_pipeline: MakePipeline, other: Pipeline, path: str) -> None:
    ours = await make_pipeline(upstream={"url": other.url + path, "model": other.model, "share": 1.0})
    async with openai.AsyncOpenAI(base_url=ours.url + "/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": ours.model, "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content, whole.model) == ("".join(THEIRS), other.model)
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(THEIRS)
        completion = await client.completions.create(model=ours.model, prompt="hi")
        assert completion.choices[0].text == "".join(THEIRS)
    assert ours.worker.taken.empty()


async def test_a_stream_comes_as_it_is(make_pipeline: MakePipeline, other: Pipeline) -> None:
    """To the byte, but for what is a new answer's own; each part at once."""
    went_on = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "one"))
        await went_on.wait()
        await saying("one", " two")(work)

    other.worker.script = script
    ours = await make_pipeline(upstream={"url": other.url, "share": 1.0, "model": other.model}, keepalive_s=0.05)
    async with ours.post(ours.chat(stream=True)) as response:
        assert response.headers[SERVED_BY_HEADER] == "upstream"
        assert response.headers["X-Accel-Buffering"] == "no"
        text = ""
        while "one" not in text:
            text += (await response.content.readany()).decode()
        while ": keep-alive" not in text.rpartition("\n\n")[2]:
            text += (await response.content.readany()).decode()
        went_on.set()
        text += (await response.text()) if not response.content.at_eof() else ""
    events = parse(text)
    assert events[-1].data == "[DONE]"
    assert all(event.id for event in events)


async def test_a_header_chooses(make_pipeline: MakePipeline, other: Pipeline) -> None:
    ours = await make_pipeline(upstream={"url": other.url, "model": other.model, "share": 0.5})

    async def ask(side: str) -> aiohttp.ClientResponse:
        return await ours.session.post(
            ours.url + "/v1/chat/completions", json=ours.chat(), headers={SERVE_HEADER: side}
        )

    for _ in range(8):
        assert await text_of(await ask("upstream")) == ("".join(THEIRS), "upstream")
        assert await text_of(await ask("here")) == ("Hello 世界 👋", "here")
    refused = await ask("elsewhere")
    assert (refused.status, (await refused.json())["error"]["param"]) == (400, SERVE_HEADER)


async def test_an_alias_leads_both_ways_and_a_retry_to_where_its_first_try_went(
    make_pipeline: MakePipeline, other: Pipeline
) -> None:
    """Our model's slug is known before it is made: the next one's."""
    number = int(other.model.removeprefix("tiny-")) + 1
    aliases = f"mixed=tiny-{number}@1,upstream/{other.model}@1 there=upstream/{other.model} mine=Org/tiny-{number}"
    ours = await make_pipeline(upstream={"url": other.url, "aliases": aliases})

    async def ask(model: str, **headers: str) -> tuple[str, str]:
        body = {**ours.chat(), "model": model}
        async with ours.session.post(ours.url + "/v1/chat/completions", json=body, headers=headers) as response:
            return await text_of(response)

    assert await ask("there") == ("".join(THEIRS), "upstream")
    assert await ask("mine") == ("Hello 世界 👋", "here")
    first = [await ask("mixed", **{"Idempotency-Key": f"key-{n}"}) for n in range(12)]
    assert {side for _, side in first} == {"here", "upstream"}
    again = [await ask("mixed", **{"Idempotency-Key": f"key-{n}"}) for n in range(12)]
    assert again == first
    assert ours.worker.taken.qsize() == 1 + sum(side == "here" for _, side in first)
    with pytest.raises(AssertionError, match="model_not_found"):
        await ask("there", **{SERVE_HEADER: "here"})


async def test_aliases_are_listed_and_what_is_left_to_run_under_one_runs_here(
    make_pipeline: MakePipeline, other: Pipeline
) -> None:
    number = int(other.model.removeprefix("tiny-")) + 1
    mine = f"tiny-{number}"
    aliases = f"mixed={mine}@1,upstream/x@99 there=upstream/x"
    ours = await make_pipeline(upstream={"url": other.url, "aliases": aliases})
    unserved = await make_pipeline(
        take=None, upstream={"url": other.url, "aliases": f"idle=tiny-{number + 1} there=upstream/x"}
    )
    async with openai.AsyncOpenAI(base_url=ours.url + "/v1", api_key="none", max_retries=0) as client:
        listed = {model.id: model.to_dict() async for model in client.models.list()}
        one = await client.models.retrieve("mixed")
    assert list(listed) == [mine, "mixed", "there"]
    assert one.to_dict() == listed["mixed"]
    assert {**listed["mixed"], "id": mine} == listed[mine]
    assert listed["there"]["builds"] == [] and "context_length" not in listed["there"]
    async with unserved.session.get(unserved.url + "/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["there"]
    body = {**ours.chat(), "model": "mixed"}
    for _ in range(8):
        async with ours.session.post(
            ours.url + "/v1/chat/completions", json=body, headers={"Prefer": "respond-async"}
        ) as response:
            assert response.status == 202
    assert ours.worker.taken.qsize() <= 8 and other.worker.taken.empty()


def test_aliases_are_drawn_by_weight() -> None:
    alias = parse_aliases("a=x@3,upstream/org/y:7b@1 b=z")["a"]
    drawn = Counter(alias.pick(n / 1000) for n in range(1000))
    assert drawn == {Target("x", False): 750, Target("org/y:7b", True): 250}


@pytest.mark.parametrize(
    "text", ["a", "a=", "=x", "a=x@0", "a=x@-1", "a=x@nan", "a=x@inf", "a=x,", "a=x a=y", "a=upstream/"]
)
def test_aliases_that_lead_nowhere_stop_the_start(text: str) -> None:
    with pytest.raises(SetupError, match=r"upstream\.aliases"):
        parse_aliases(text)


async def test_so_do_those_to_what_is_not_served(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="not served here"):
        await make_pipeline(upstream={"aliases": "a=unknown"})
    with pytest.raises(SetupError, match=r"needs upstream\.url"):
        await make_pipeline(upstream={"aliases": "a=upstream/x"})
    with pytest.raises(SetupError, match="cannot be read"):
        await make_pipeline(upstream={"url": "http://x", "api_key_file": str(tmp_path / "none")})


async def test_it_answers_while_there_are_no_workers_here(make_pipeline: MakePipeline, other: Pipeline) -> None:
    ours = await make_pipeline(take=None, upstream={"url": other.url, "model": other.model, "fallback": True})
    assert await text_of(await ours.post(ours.chat())) == ("".join(THEIRS), "upstream")
    async with ours.session.get(ours.url + "/ready") as response:
        report = await response.json()
        assert (response.status, report["state"]) == (200, "degraded")
        assert report["reasons"] == [f"no prefill worker of {ours.model}"]
    keyed = await ours.session.post(
        ours.url + "/v1/chat/completions", json=ours.chat(), headers={"Idempotency-Key": "maybe-begun"}
    )
    assert keyed.status == 503
    await ours.worker.start()
    await ours.gateway.readiness.check(ours.model, 5.0)
    assert await text_of(await ours.post(ours.chat())) == ("Hello 世界 👋", "here")
    await ours.worker.close()


async def test_what_is_left_to_run_is_never_sent_there(make_pipeline: MakePipeline, other: Pipeline) -> None:
    ours = await make_pipeline(upstream={"url": other.url, "model": other.model, "share": 1.0})
    url, later = ours.url + "/v1/chat/completions", {"Prefer": "respond-async"}
    async with ours.session.post(url, json=ours.chat(), headers=later) as response:
        assert response.status == 202
    async with ours.session.post(url, json=ours.chat(), headers={**later, SERVE_HEADER: "upstream"}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "Prefer")


async def test_a_client_that_leaves_ends_the_job_there(make_pipeline: MakePipeline, other: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "x"))
        await asyncio.Event().wait()

    other.worker.script = script
    ours = await make_pipeline(upstream={"url": other.url, "model": other.model, "share": 1.0})
    for stream in (True, False):
        asking = asyncio.create_task(
            ours.session.post(ours.url + "/v1/chat/completions", json=ours.chat(stream=stream))
        )
        work = await asyncio.wait_for(other.worker.taken.get(), 10)
        if stream:
            (await asking).close()
        asking.cancel()
        assert await asyncio.wait_for(other.worker.cancelled.get(), 10) == work.job.id


Answering = Any


def saying_status(status: int, body: Any = None, text: str = "", **headers: str) -> Answering:
    async def answer(request: web.Request) -> web.Response:
        if body is not None:
            return web.json_response(body, status=status, headers=headers)
        return web.Response(status=status, text=text, headers=headers)

    return answer


BAD = {"error": {"message": "no such thing", "type": "invalid_request_error", "param": "x", "code": "weird"}}


@pytest.mark.parametrize(
    ("answer", "status", "code", "words"),
    [
        (saying_status(400, BAD), 400, "weird", "no such thing"),
        (saying_status(422, {"detail": [{"msg": "field required"}]}), 422, "invalid_request", "field required"),
        (saying_status(429, BAD, **{"Retry-After": "7"}), 429, "weird", "no such thing"),
        (saying_status(401, BAD), 502, "upstream_unavailable", "api_key_file"),
        (saying_status(403, text="no"), 502, "upstream_unavailable", "api_key_file"),
        (saying_status(404, text="page not found"), 502, "upstream_unavailable", "answered 404"),
        (saying_status(500, BAD), 502, "upstream_unavailable", "answered 500: no such thing"),
        (saying_status(503), 502, "upstream_unavailable", "answered 503"),
        (saying_status(504), 504, "upstream_timeout", "answered 504"),
        (saying_status(302, Location="http://127.0.0.1:1/"), 502, "upstream_unavailable", "answered 302"),
        (saying_status(200, text="<html>"), 502, "upstream_unavailable", "instead of JSON"),
    ],
)
async def test_its_errors_are_told_apart(
    make_pipeline: MakePipeline, answer: Answering, status: int, code: str, words: str
) -> None:
    async with small_upstream(answer) as url:
        ours = await make_pipeline(take=False, upstream={"url": url, "share": 1.0})
        async with ours.post(ours.chat()) as response:
            body = await response.json()
            assert (response.status, body["error"]["code"]) == (status, code)
            assert words in body["error"]["message"]
            if status == 429:
                assert response.headers["Retry-After"] == "7"


async def test_one_that_is_down_or_says_nothing(make_pipeline: MakePipeline) -> None:
    async def nothing(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with small_upstream(nothing) as url:
        slow = await make_pipeline(take=False, upstream={"url": url, "share": 1.0, "timeout_s": 0.2})
        async with slow.post(slow.chat(stream=True)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, "upstream_timeout")
    down = await make_pipeline(take=False, upstream={"url": url, "share": 1.0})
    async with down.post(down.chat()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "upstream_unavailable")
        assert response.headers["Retry-After"]


@pytest.mark.parametrize(("breaks", "code"), [(True, "upstream_unavailable"), (False, "upstream_timeout")])
async def test_one_that_stops_in_a_stream(make_pipeline: MakePipeline, breaks: bool, code: str) -> None:
    """An event says so, in a line of its own, and no [DONE] follows."""

    async def stop(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\ndata: {"cho')
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        await asyncio.Event().wait()
        return response

    async with small_upstream(stop) as url:
        ours = await make_pipeline(take=False, upstream={"url": url, "share": 1.0, "timeout_s": 0.3})
        async with ours.post(ours.chat(stream=True)) as response:
            assert response.status == 200
            text = await response.text()
    assert "[DONE]" not in text
    assert f'"code":"{code}"' in parse(text)[-1].data


@pytest.mark.parametrize(
    ("said", "is_whole"),
    [
        ('data: {"choices": []}\n\n', False),
        ('data: {"choices": []}\n\ndata: {"choi', False),
        ('data: {"choices": []}\n\ndata: [DONE]', True),  # without the end of its line
        ('data: {"error": {"message": "no", "code": "theirs"}}\n\n', True),
        ('data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n', True),
        ('data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n', False),
    ],
)
async def test_a_stream_that_ends_without_saying_so(make_pipeline: MakePipeline, said: str, is_whole: bool) -> None:
    """HTTP alone would tell the client nothing. An error of the upstream's own is not told twice."""

    async def close(request: web.Request) -> web.Response:
        return web.Response(text=said, content_type="text/event-stream")

    async with small_upstream(close) as url:
        ours = await make_pipeline(take=False, upstream={"url": url, "share": 1.0})
        async with ours.post(ours.chat(stream=True)) as response:
            text = await response.text()
    assert text.startswith(said)
    assert ('"code":"upstream_unavailable"' in text) == (not is_whole)


async def test_it_gets_our_key_and_not_the_clients(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    seen: list[web.Request] = []
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        bodies.append(await request.json())
        return web.json_response({"choices": []})

    (tmp_path / "key").write_text("sk-ours\n", encoding="utf-8")
    async with small_upstream(answer) as url:
        upstream = {"url": url, "share": 1.0, "model": "theirs", "api_key_file": str(tmp_path / "key")}
        ours = await make_pipeline(take=False, upstream=upstream)
        body = ours.chat(reasoning_effort="high", seed=2**70)
        headers = {"Authorization": "Bearer sk-client", "Cookie": "a=b", "X-Request-Id": "r-1"}
        async with ours.session.post(ours.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (200, "r-1")
    (request,) = seen
    assert request.headers["Authorization"] == "Bearer sk-ours"
    assert (request.headers["X-Request-Id"], request.headers[SERVE_HEADER]) == ("r-1", "here")
    assert "Cookie" not in request.headers
    assert bodies == [{**body, "model": "theirs"}]


async def mirrored(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The fields of the one comparison, once it is made."""
    async with asyncio.timeout(10):
        while not (found := [record for record in caplog.records if record.name == "kvrelay.mirror"]):
            await asyncio.sleep(0.01)
    caplog.clear()
    (record,) = found
    fields: dict[str, Any] = record.__dict__["fields"]
    return fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_both_sides_answer_and_are_compared(
    make_pipeline: MakePipeline, other: Pipeline, caplog: pytest.LogCaptureFixture, stream: bool, share: float
) -> None:
    """`share` 1: the upstream's answer is what the client gets, and ours is what it is compared with."""
    caplog.set_level(logging.INFO, "kvrelay.mirror")
    ours = await make_pipeline(upstream={"url": other.url, "model": other.model, "share": share, "mirror": 1.0})
    answers, another = ("here", "upstream") if share == 0.0 else ("upstream", "here")
    for texts, outcome in ((("Hello", " you"), "different"), (THEIRS, "same")):
        ours.worker.script = saying(*texts)
        async with ours.post(ours.chat(stream=stream)) as response:
            said = await response.text()
            assert response.headers.get(SERVED_BY_HEADER, "here") == answers
        assert texts[-1] in said if share == 0.0 else THEIRS[-1] in said
        fields = await mirrored(caplog)
        assert fields["outcome"] == outcome
        assert (fields["here_reasons"], fields["upstream_reasons"]) == ("stop", "stop")
        assert (fields["here_tokens"], fields["here_chars"]) == (len(texts), len("".join(texts)))
        assert fields["upstream_chars"] == len("".join(THEIRS))
        assert fields["here_s"] > 0 and fields["upstream_s"] > 0
        assert (f"{another}_ttft_s" in fields) == (stream or another == "here")
        assert not set(THEIRS) & set(map(str, fields.values()))
    ours.worker.script, other.worker.script = saying("same", "x"), saying("same", "y")
    async with ours.post(ours.chat(stream=stream)) as response:
        await response.read()
    fields = await mirrored(caplog)
    assert (fields["choice"], fields["differs_at"]) == (0, 4)


async def test_a_mirror_that_fails_costs_its_client_nothing(
    make_pipeline: MakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.mirror")
    async with small_upstream(saying_status(500)) as url:
        ours = await make_pipeline(upstream={"url": url, "mirror": 1.0})
        assert await text_of(await ours.post(ours.chat())) == ("Hello 世界 👋", "here")
        fields = await mirrored(caplog)
    assert (fields["outcome"], fields["error"]) == ("failed", "upstream_unavailable")


async def test_metrics_count_both(make_pipeline: MakePipeline, other: Pipeline) -> None:
    upstream = {"url": other.url, "model": other.model, "share": 1.0, "mirror": 1.0}
    ours = await make_pipeline(upstream=upstream)
    telemetry.configure("gateway", "gateway-test", Settings())
    try:
        async with ours.post(ours.chat()) as response:
            assert response.status == 200
        page = ""
        async with asyncio.timeout(10):
            while "kvrelay_mirrored" not in page:  # the comparison is made after the answer
                async with ours.session.get(telemetry.endpoint()) as response:
                    page = await response.text()
    finally:
        telemetry.shutdown()
    lines = page.splitlines()
    assert 'kvrelay_forwarded_total{code="ok",why="share"} 1.0' in lines
    assert 'kvrelay_mirrored_total{outcome="different"} 1.0' in lines
    for side in ("here", "upstream"):
        assert f'kvrelay_mirror_total_seconds_count{{side="{side}"}} 1.0' in lines
