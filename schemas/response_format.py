"""What an answer has to be, in OpenAI's words: any text, a JSON object, JSON after a schema; or a call of a tool."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
_PARAM = "response_format"


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Asks for nothing."""


class JsonObject(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`schema` is a JSON Schema. `strict` is accepted and does not matter: every answer is held to its schema."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema

    def __post_init__(self) -> None:
        if self.json_schema.schema is None:
            raise InvalidRequest("response_format.json_schema has no schema", param=_PARAM)
        _check_size(self.json_schema.schema)


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="tool_call"):
    """One call, in the format of `services.text.tool_format`: what a `tool_choice` that asks for one becomes.

    `functions`: the JSON Schema of each one's arguments.
    """

    functions: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check_size(self.functions)


ResponseFormat = Text | JsonObject | JsonSchema | ToolCall
Constrained = JsonObject | JsonSchema | ToolCall


def schema_of(wanted: Constrained) -> dict[str, Any]:
    if isinstance(wanted, JsonObject):
        return {"type": "object"}
    if isinstance(wanted, ToolCall):
        return {"anyOf": [_call(place, *function) for place, function in enumerate(wanted.functions.items())]}
    assert wanted.json_schema.schema is not None
    return wanted.json_schema.schema


def _call(place: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    moved = _moved(arguments, f"#/anyOf/{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object", **moved}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema that is now at `root` of another, its references with it."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, root)
        for key, value in schema.items()
    }


def _check_size(schema: dict[str, Any]) -> None:
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(f"a schema is limited to {MAX_SCHEMA_DEPTH} levels", param=_PARAM)
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"a schema is limited to {MAX_SCHEMA_BYTES} bytes, got {size}", param=_PARAM)


def not_followed(why: str) -> InvalidRequest:
    return InvalidRequest(f"response_format cannot be followed: {why}", param=_PARAM)


def depth_of(value: Any) -> int:
    """Stops counting behind the limit: what is deeper is refused, however deep it is."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
        depth += 1
    return depth
