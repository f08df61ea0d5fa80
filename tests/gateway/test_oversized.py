"""CASES 19: what is larger than a message of NATS may be, over a broker that takes 64 KiB, beside small requests."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.events import Logprobs, Token
from services.bus.server import NatsServer
from tests.gateway import conftest
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, ending, saying
from tests.gateway.sse import parse
from tests.gateway.tiny_model import tiny_text, token_id

LIMIT_BYTES = 65_536
BUS = msgspec.structs.replace(conftest.BUS, max_payload_bytes=LIMIT_BYTES)
X = token_id(ord("x"))  # three digits and a comma in a job


@pytest.fixture
def narrow_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, settings=BUS) as running:
        yield running


@pytest.fixture
async def pipeline(narrow_server: NatsServer, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Its context has room for more tokens than a message has."""
    long = msgspec.structs.replace(tiny_text(), context_tokens=100_000)
    monkeypatch.setattr(conftest, "tiny_text", lambda slug: msgspec.structs.replace(long, slug=slug))
    return await make_pipeline(url=narrow_server.url, bus=BUS, max_body_bytes=1_000_000)


async def answered(pipeline: Pipeline, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
    async with pipeline.post({"model": pipeline.model, **body}, path) as response:
        return response.status, await response.json()


def nobody_reconnected(pipeline: Pipeline) -> bool:
    return pipeline.gateway._bus.num_reconnects == 0 and pipeline.bus.num_reconnects == 0


async def test_the_big_are_answered_or_refused_and_the_small_never_notice(pipeline: Pipeline) -> None:
    async def big() -> None:
        for body, status, code in [
            ({"prompt": "x" * 10_000}, 200, ""),
            ({"prompt": [[X] * 1000] * 100}, 200, ""),  # each prompt is a job of its own
            ({"prompt": "x" * 20_000}, 413, "too_large"),
            ({"prompt": "x", "metadata": {"a": "x" * 300_000}}, 413, "too_large"),
            ({"prompt": "x" * 5_000, "metadata": {"a": "x" * 60_000}}, 413, "too_large"),
            ({"prompt": ["x"] * 200}, 400, "invalid_request"),
        ]:
            got, answer = await answered(pipeline, body, "/v1/completions")
            assert got == status, answer
            if status == 413 and "metadata" not in body:
                assert str(LIMIT_BYTES) in answer["error"]["message"]
            assert status == 200 or answer["error"]["code"] == code

    small = (answered(pipeline, pipeline.chat(str(number))) for number in range(20))
    _, *answers = await asyncio.gather(big(), *small)
    assert [status for status, _ in answers] == [200] * 20
    assert nobody_reconnected(pipeline)


async def test_up_to_the_last_byte(pipeline: Pipeline) -> None:
    """The longest job that is stored, found by halving: header and payload count, and no length breaks anything."""
    fits, too_large = 10_000, 20_000
    while too_large - fits > 1:
        num_tokens = (fits + too_large) // 2
        status, _ = await answered(pipeline, {"prompt": [X] * num_tokens}, "/v1/completions")
        assert status in (200, 413)
        fits, too_large = (num_tokens, too_large) if status == 200 else (fits, num_tokens)
    assert 0 <= LIMIT_BYTES - 4 * fits < 2_000, "what else a job says, and its headers"
    assert nobody_reconnected(pipeline)


async def test_answers_with_huge_logprobs(pipeline: Pipeline) -> None:
    many = [(X + number, -1.0 - number / 7) for number in range(20)]

    async def script(work: Work) -> None:
        tokens = [Token(choice=0, index=i, id=X, text="x", logprobs=Logprobs(-0.25, many)) for i in range(500)]
        assert len(msgspec.json.encode(tokens)) > 3 * LIMIT_BYTES
        await work.say(work.start(), *tokens, *ending(work.job, 500))

    pipeline.worker.script = script
    body = pipeline.chat(logprobs=True, top_logprobs=20)
    status, whole = await answered(pipeline, body)
    assert status == 200 and len(whole["choices"][0]["logprobs"]["content"]) == 500
    async with pipeline.post({**body, "stream": True}) as response:
        events = parse(await response.text())
    chunks = [json.loads(event.data)["choices"][0] for event in events[:-1]]
    assert events[-1].data == "[DONE]"
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == whole["choices"][0]["logprobs"][
        "content"
    ]
    pipeline.worker.script = saying("small")
    assert (await answered(pipeline, pipeline.chat()))[0] == 200
    assert nobody_reconnected(pipeline)
