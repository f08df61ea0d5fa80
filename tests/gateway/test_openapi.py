"""The API's document says all that the API does, and is a document."""

import json
from typing import Any

import jsonschema
import pytest

from services.gateway.gateway import Gateway
from services.gateway.openapi import document
from services.gateway.operations import OPERATIONS
from tests.gateway.conftest import Pipeline

JSON = "application/json"


def routes_of(gateway: Gateway) -> set[tuple[str, str]]:
    assert gateway._runner is not None
    routes = gateway._runner.app.router.routes()
    return {(r.method.lower(), r.resource.canonical) for r in routes if r.resource is not None and r.method != "HEAD"}


async def test_every_route_is_documented_and_no_other(pipeline: Pipeline) -> None:
    documented = [(operation.method, operation.path) for operation in OPERATIONS]
    assert routes_of(pipeline.gateway) == set(documented)
    assert len(documented) == len(set(documented))


async def test_it_is_served(pipeline: Pipeline) -> None:
    async with pipeline.session.get(pipeline.url + "/openapi.json") as response:
        assert response.status == 200
        assert await response.json() == document()


def test_references_lead_somewhere_and_schemas_are_schemas() -> None:
    made = document()
    found = made["components"]["schemas"]
    for name, schema in found.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert references(schema) <= {f"#/components/schemas/{other}" for other in found}, name
    assert references(made) == {f"#/components/schemas/{name}" for name in found}


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if "$ref" in value else set()
    return own.union(*map(references, value.values()))


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_shapes_that_it_names(pipeline: Pipeline, stream: bool) -> None:
    made = document()
    for path, asked in (
        ("/v1/chat/completions", pipeline.chat(logprobs=True, top_logprobs=2, n=2)),
        ("/v1/completions", {"model": pipeline.model, "prompt": ["a", "b"], "logprobs": 1, "echo": False}),
    ):
        told = made["paths"][path]["post"]
        check(made, told["requestBody"]["content"][JSON]["schema"], asked)
        content = told["responses"]["200"]["content"]
        async with pipeline.post({**asked, "stream": stream}, path) as response:
            assert response.status == 200
            if not stream:
                check(made, content[JSON]["schema"], await response.json())
                continue
            lines = (await response.text()).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert len(data) > 3
        for chunk in data:
            check(
                made,
                content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"][1]["contentSchema"],
                json.loads(chunk),
            )


def check(made: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": made["components"]}).validate(value)
