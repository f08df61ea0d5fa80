"""Schemas of strangers: checked where they can do no harm, and what is good is kept."""

import asyncio
import os
import signal
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from schemas.response_format import MAX_SCHEMA_BYTES, JsonObject, JsonSchema, NamedSchema
from services.text.grammars import Grammars
from tests.gateway.tiny_model import tiny_text

HARMLESS = {"type": "object", "properties": {"a": {"type": "string"}}}
# Each takes minutes, gigabytes or the stack where nothing stops it.
HOSTILE: dict[str, dict[str, Any]] = {
    "products": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]},
    "a large multiple": {"type": "integer", "multipleOf": 100_003_007},
    "references": {
        "$defs": {
            **{str(i): {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}, "required": ["x"]}
               for i in range(750)},
            "750": {"type": "string"},
        },
        "$ref": "#/$defs/0",
    },
    "no end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "repetitions": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "alternatives": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(300)]},
}  # fmt: skip


def wanted(schema: dict[str, Any]) -> JsonSchema:
    return JsonSchema(NamedSchema(schema=schema))


@pytest.fixture
def grammars() -> Grammars:
    return tiny_text().grammars


async def test_hostile_schemas_are_refused_and_others_are_checked_beside(grammars: Grammars) -> None:
    """Nobody but the process that checks them is harmed. The loop goes on meanwhile."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    for name, schema in HOSTILE.items():
        with pytest.raises(InvalidRequest) as caught:
            await grammars.check(wanted(schema))
        assert caught.value.param == "response_format", name
        await grammars.check(wanted(HARMLESS | {"title": name}))
    turning.cancel()
    assert turns > 10


async def test_a_verdict_is_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find_out = grammars._asked
    monkeypatch.setattr(grammars, "_asked", lambda source: (asked.append(source), find_out(source))[1])
    for schema in (HARMLESS, {"not": {}}, HARMLESS, {"not": {}}):
        try:
            await grammars.check(wanted(schema))
        except InvalidRequest:
            assert schema == {"not": {}}
    assert len(asked) == 2
    assert await grammars.of(wanted(HARMLESS), is_checked=False) is await grammars.of(wanted(HARMLESS), is_checked=True)
    assert len(asked) == 2


async def test_any_object(grammars: Grammars) -> None:
    grammar = await grammars.of(JsonObject(), is_checked=False)
    encode = tiny_text().tokenizer.encode
    text = encode('{"a": [1, {"b": null}]}')
    assert grammar.matcher().num_fitting(text) == len(text)
    assert grammar.matcher().num_fitting(encode("[1]")) == 0


def test_limits_that_are_looked_at_first() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"items": deep}
    for schema in (deep, {"const": "x" * MAX_SCHEMA_BYTES}, None):
        with pytest.raises(InvalidRequest) as caught:
            JsonSchema(NamedSchema(schema=schema))
        assert caught.value.param == "response_format"


async def test_a_checker_that_dies_is_replaced(grammars: Grammars) -> None:
    await grammars.check(wanted(HARMLESS))
    checker = grammars._checker
    assert checker is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    await grammars.check(wanted({"type": "string"}))
    assert grammars._checker is not checker and checker.ended_by == signal.SIGKILL
