"""What an answer has to be, in OpenAI's words: any text, a JSON object, or JSON after a schema."""

from typing import Any

import msgspec

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
        schema = self.json_schema.schema
        if schema is None:
            raise InvalidRequest("response_format.json_schema has no schema", param=_PARAM)
        if depth_of(schema) > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"a schema is limited to {MAX_SCHEMA_DEPTH} levels", param=_PARAM)
        size = len(msgspec.json.encode(schema))
        if size > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"a schema is limited to {MAX_SCHEMA_BYTES} bytes, got {size}", param=_PARAM)


ResponseFormat = Text | JsonObject | JsonSchema
Constrained = JsonObject | JsonSchema


def schema_of(wanted: Constrained) -> dict[str, Any]:
    if isinstance(wanted, JsonObject):
        return {"type": "object"}
    assert wanted.json_schema.schema is not None
    return wanted.json_schema.schema


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
