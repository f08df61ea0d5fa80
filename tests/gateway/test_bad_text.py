"""CASES 34: lone surrogates, bytes that are no UTF-8 and NUL, in every field that takes text."""

import json
import re
from typing import Any

import pytest

from tests.gateway.conftest import Pipeline
from tests.gateway.test_refusals import JSON, num_published, refused

BODY = (
    '{"model": "MODEL", "messages": [{"role": "user", "content": "CONTENT", "name": "NAME"}], "stop": "STOP",'
    ' "user": "USER", "cache_salt": "SALT", "metadata": {"a": "METADATA"}, "stream": STREAM}'
)
FIELDS = {
    "CONTENT": "messages[0].content",
    "NAME": "messages[0].name",
    "STOP": "stop",
    "MODEL": "model",
    "USER": "user",
    "SALT": "cache_salt",
    "METADATA": "metadata",
}
A_CLASS = re.compile(r"Traceback|[A-Z]\w+(Error|Exception)|surrogateescape|codec")  # what Python calls such things


def body(pipeline: Pipeline, stream: bool = False, **texts: str) -> bytes:
    """Each field as a client spells it in JSON."""
    filled = BODY.replace("STREAM", json.dumps(stream))
    for name in FIELDS:
        filled = filled.replace(f'"{name}"', f'"{texts.get(name, pipeline.model if name == "MODEL" else "x")}"')
    return filled.encode("latin-1")


async def post(pipeline: Pipeline, data: bytes, path: str = "/v1/chat/completions") -> Any:
    async with pipeline.session.post(pipeline.url + path, data=data, headers=JSON) as response:
        await response.read()
    return response


@pytest.mark.parametrize("field", FIELDS)
async def test_half_a_pair_is_refused_with_its_field(pipeline: Pipeline, field: str) -> None:
    for stream in (False, True):
        for bad in (r"\ud83d", r"\udc4b\ud83d", r"a\udc4b", r"\ud83d\\udc4b"):
            response = await post(pipeline, body(pipeline, stream, **{field: bad}))
            error = await refused(response)
            assert (response.status, error["type"]) == (400, "invalid_request_error")
            assert str(error["param"]).startswith(FIELDS[field]) and not A_CLASS.search(await response.text())
    assert await num_published(pipeline) == 0


@pytest.mark.parametrize("field", FIELDS)
async def test_bytes_that_are_no_text_are_refused(pipeline: Pipeline, field: str) -> None:
    response = await post(pipeline, body(pipeline, **{field: "a\xffb"}))
    error = await refused(response)
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert not A_CLASS.search(await response.text())
    assert await num_published(pipeline) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_good_pair_and_nul_reach_the_worker(pipeline: Pipeline, stream: bool) -> None:
    texts = {name: r"\ud83d\udc4b\u0000" for name in FIELDS if name != "MODEL"}
    assert (await post(pipeline, body(pipeline, stream, **texts))).status == 200
    job = (await pipeline.worker.taken.get()).job
    assert "👋\0".encode() in bytes(id_ - 3 for id_ in job.prompt_token_ids or [] if id_ > 2)
    assert (job.stop, job.cache_salt, job.metadata) == (["👋\0"], "👋\0", {"a": "👋\0"})
    assert (await post(pipeline, body(pipeline, stream, MODEL=r"\u0000"))).status == 404


@pytest.mark.parametrize("prompt", [r'"\ud83d"', r'["a", "\udc4b\ud83d"]'])
async def test_raw_prompts_too(pipeline: Pipeline, prompt: str) -> None:
    data = f'{{"model": "{pipeline.model}", "prompt": {prompt}}}'.encode()
    response = await post(pipeline, data, "/v1/completions")
    assert (response.status, (await refused(response))["param"]) == (400, "prompt")
    assert await num_published(pipeline) == 0
