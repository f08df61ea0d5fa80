"""Small random JSON schemas, each the same for its seed. Arrays have an end: where not, a small model goes on."""

import random
from typing import Any

WORDS = ["name", "city", "age", "price", "colour", "tags", "items", "address", "status"]
WORDS += ["id", "count", "title", "author", "year", "notes", "kind", "rate", "steps"]
PATTERNS = ["^[A-Z]{2}[0-9]{3}$", "^[a-z]{2,12}@[a-z]{2,12}\\.com$", "^#[0-9a-f]{6}$", "^(yes|no)$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    """As a job and an HTTP request spell it."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def random_schema(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    schema = _object(chance, depth=0)
    if chance.random() < 0.15:
        schema["$defs"] = {"part": _object(chance, depth=2)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.8],
        "additionalProperties": False,
    }


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _string, _number, _number, _enum, _boolean, _nullable]
    return chance.choice([*kinds, _object, _array] if depth < 3 else kinds)(chance, depth)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    extra: list[dict[str, Any]] = [
        {},
        {"maxLength": chance.randint(5, 40)},
        {"minLength": 3, "maxLength": 30},
        {"pattern": chance.choice(PATTERNS)},
        {"format": chance.choice(FORMATS)},
    ]
    return {"type": "string", **chance.choice(extra)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-10, 10)
    extra: list[dict[str, Any]] = [{}, {"minimum": low}, {"minimum": low, "maximum": low + chance.randint(0, 200)}]
    return {"type": chance.choice(["integer", "number"]), **chance.choice(extra)}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": chance.choice([["low", "medium", "high"], [1, 2, 3], ["a", None, 7], [True, "maybe"]])}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nullable(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(chance, 3), {"type": "null"}]}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    bounds: dict[str, Any] = chance.choice([{"minItems": 1, "maxItems": 4}, {"maxItems": 3}, {"maxItems": 8}])
    return {"type": "array", "items": _value(chance, depth + 1), **bounds}
