"""Answers that are held to a schema, from the real model: valid whenever they end, and they nearly always do."""

import json
from typing import Any

import jsonschema
import pytest

from schemas.events import Done, Error
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import Answer, LocalPipeline
from tests.text.random_schemas import json_format, random_schema

MAX_TOKENS = 512
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def asking(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = "Answer with JSON about a small shop. Schema: " + json.dumps(schema)
    return {"messages": [{"role": "user", "content": content}], "response_format": json_format(schema), **fields}


def assert_valid(answer: Answer, schema: dict[str, Any], choice: int = 0) -> None:
    jsonschema.validate(json.loads(answer.text(choice)), schema, cls=jsonschema.Draft202012Validator)


async def num_cut(pipeline: LocalPipeline, seeds: range) -> int:
    """Of the answers to random schemas, greedy and drawn in turns; those that end are valid."""
    schemas = [random_schema(seed) for seed in seeds]
    jobs = [
        asking(schema, max_tokens=MAX_TOKENS, temperature=0.7 * (seed % 2), seed=seed)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    cut = 0
    for schema, answer in zip(schemas, await pipeline.ask_all(jobs), strict=True):
        assert isinstance(answer.end, Done), answer.end
        if answer.finish().reason == "stop":
            assert_valid(answer, schema)
        else:
            assert len(answer.token_ids()) == MAX_TOKENS
            cut += 1
    return cut


async def test_a_dozen_schemas(pipelines: Pipelines) -> None:
    async with pipelines("int8") as pipeline:
        assert await num_cut(pipeline, range(12)) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_two_hundred_schemas(pipelines: Pipelines) -> None:
    async with pipelines("int8") as pipeline:
        cut = sum([await num_cut(pipeline, range(start, start + 10)) for start in range(0, 200, 10)])
    print(f"\n200 answers: {200 - cut} ended and are valid, {cut} were cut at {MAX_TOKENS} tokens")
    assert cut <= 10


async def test_every_choice_is_held_to_the_schema(pipelines: Pipelines) -> None:
    """With penalties and logprobs, which go another way through the sampler; a forced token is certain."""
    async with pipelines("int8") as pipeline:
        job = asking(PERSON, n=3, seed=4, max_tokens=100, logprobs=5, presence_penalty=0.5, logit_bias={2: -100})
        answer = await pipeline.ask(**job)
        for choice in range(3):
            assert answer.finish(choice).reason == "stop"
            assert_valid(answer, PERSON, choice)
        tokens = [event for event in answer.essence if getattr(event, "logprobs", None)]
        assert tokens[0].logprobs.logprob == 0.0 and len(tokens[0].logprobs.top) < 5


async def test_any_object_and_an_end_before_its_time(pipelines: Pipelines) -> None:
    async with pipelines("int8") as pipeline:
        job = asking(PERSON, temperature=0, max_tokens=200)
        whole, short, stopped, anything = await pipeline.ask_all(
            [job, job | {"max_tokens": 5}, job | {"stop": ["age"]}, job | {"response_format": {"type": "json_object"}}]
        )
        assert_valid(whole, PERSON)
        assert whole.text().startswith('{"name": ')
        assert short.finish().reason == "length" and whole.text().startswith(short.text())
        assert stopped.finish().stop == "age" and whole.text().startswith(stopped.text() + "age")
        assert isinstance(json.loads(anything.text()), dict) or anything.finish().reason == "length"


@pytest.mark.parametrize(
    "job",
    [
        {"response_format": json_format({"not": {}})},
        {"response_format": json_format({"type": "integer", "multipleOf": 100_003_007})},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "none"}}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
    ],
)
async def test_a_job_that_cannot_be_held_to_it_is_refused(tiny_pipelines: Pipelines, job: dict[str, Any]) -> None:
    async with tiny_pipelines() as pipeline:
        answer = await pipeline.ask(prompt="x", max_tokens=3, **job)
        assert isinstance(answer.end, Error) and answer.end.code == "invalid_request"
        assert str(answer.end.param).startswith(("response_format", "ignore_eos"))
        assert isinstance((await pipeline.ask(prompt="x", max_tokens=3)).end, Done)


async def test_what_says_nothing_changes_nothing(tiny_pipelines: Pipelines) -> None:
    async with tiny_pipelines() as pipeline:
        job = {"prompt": "x", "max_tokens": 20, "seed": 3}
        plain, text, null = await pipeline.ask_all(
            [job, job | {"response_format": {"type": "text"}}, job | {"response_format": None}]
        )
    assert plain.essence == text.essence == null.essence
