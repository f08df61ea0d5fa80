"""The bus as documents for others: AsyncAPI 3.0, and JSON Schemas of its messages and subjects.

`kvrelay schemas` writes them, and `tests/schemas` holds the files in `infra/schemas` to what is made here.
"""

import re
from types import UnionType
from typing import Any, get_args

import msgspec

from schemas.beat import Beat
from schemas.channels import CHANNELS, PARAMETERS, Channel
from schemas.events import Event
from schemas.job import PROMPTS, Job
from schemas.wire import WIRE_VERSION

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PARAMETER = re.compile(r"\{(\w+)\}")
_FILES: dict[str, Any] = {"job": Job, "event": Event, "beat": Beat}


def documents() -> dict[str, dict[str, Any]]:
    """File name -> document."""
    found = {f"{name}.schema.json": _file(name, kind) for name, kind in _FILES.items()}
    return {"asyncapi.json": asyncapi(), **found, "subjects.schema.json": _subjects()}


def asyncapi() -> dict[str, Any]:
    kinds = [kind for channel in CHANNELS for kind in (channel.kind, channel.reply) if kind is not None]
    shapes = [shape for kind in kinds for shape in _shapes(kind)]
    schemas, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    schema_of = {id(shape): _plain(schema) for shape, schema in zip(shapes, schemas, strict=True)}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "kvrelay over NATS",
            "version": f"{WIRE_VERSION}.0.0",
            "description": "Jobs in, events out. Fields and event types may be added within a version: ignore what "
            "you do not know.",
        },
        "defaultContentType": "application/json",
        "channels": {channel.name: _channel(channel, schema_of) for channel in CHANNELS},
        "operations": dict(operation for channel in CHANNELS for operation in _operations(channel)),
        "components": {"schemas": _exact(components)},
    }


def subject_pattern(address: str) -> str:
    """A channel's address as a regular expression."""
    parts = (
        f"({PARAMETERS[part[1:-1]][0]})" if _PARAMETER.fullmatch(part) else re.escape(part).replace(r"\$", "[$]")
        for part in address.split(".")
    )
    return f"^{r'[.]'.join(parts)}$"


def _channel(channel: Channel, schema_of: dict[int, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "address": channel.address,
        "description": f"{channel.doc} Sent by {channel.sends}, read by {channel.reads}.",
        "messages": {channel.name: _message(channel.kind, schema_of, channel.lines)},
    }
    if channel.reply is not None:
        made["messages"]["reply"] = _message(channel.reply, schema_of)
    if names := _PARAMETER.findall(channel.address):
        made["parameters"] = {name: {"description": PARAMETERS[name][1]} for name in names}
    if channel.stream:
        made["x-jetstream"] = channel.stream
    return made


def _message(kind: Any, schema_of: dict[int, Any], lines: bool = False) -> dict[str, Any]:
    """Of several lines the schema tells one."""
    if kind is None:
        return {"contentType": "application/octet-stream"}
    found = [schema_of[id(shape)] for shape in _shapes(kind)]
    payload = found[0] if len(found) == 1 else {"anyOf": found}
    return {"contentType": "application/x-ndjson" if lines else "application/json", "payload": payload}


def _operations(channel: Channel) -> list[tuple[str, dict[str, Any]]]:
    """What kvrelay itself does: who sends to it is told by what it receives."""
    ours = {"workers", "gateways"}
    place = {"$ref": f"#/channels/{channel.name}"}
    messages = [{"$ref": f"#/channels/{channel.name}/messages/{channel.name}"}]
    found: list[tuple[str, dict[str, Any]]] = []
    if channel.sends in ours:
        found.append((f"send_{channel.name}", {"action": "send", "channel": place, "messages": messages}))
    if channel.reads in ours:
        read: dict[str, Any] = {"action": "receive", "channel": place, "messages": messages}
        if channel.reply is not None:
            replies = [{"$ref": f"#/channels/{channel.name}/messages/reply"}]
            read["reply"] = {"channel": place, "messages": replies}
        found.append((f"receive_{channel.name}", read))
    return found


def _file(name: str, kind: Any) -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {"$schema": _DIALECT, "$id": f"kvrelay:{name}:{WIRE_VERSION}", **_plain(schema), "$defs": _exact(components)}


def _subjects() -> dict[str, Any]:
    """Each subject as a string of its pattern."""
    known = {
        channel.name: {"type": "string", "pattern": subject_pattern(channel.address), "description": channel.doc}
        for channel in CHANNELS
    }
    any_of = [{"$ref": f"#/$defs/{name}"} for name in known]
    return {"$schema": _DIALECT, "$id": f"kvrelay:subjects:{WIRE_VERSION}", "anyOf": any_of, "$defs": known}


def _exact(components: dict[str, Any]) -> dict[str, Any]:
    """By name, with what a job's own check demands beyond the types of its fields."""
    found = dict(sorted(components.items()))
    if "Job" in found:
        one = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in PROMPTS]
        found["Job"] = {**found["Job"], "oneOf": one}
    return found


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Without OpenAPI's `discriminator`, which neither JSON Schema nor AsyncAPI has; the tags tell all the same."""
    return {name: value for name, value in schema.items() if name != "discriminator"}


def _shapes(kind: Any) -> tuple[Any, ...]:
    """Unions of tagged structs are types to msgspec, others it must be given one by one."""
    is_tagged = kind is Event
    return get_args(kind) if isinstance(kind, UnionType) and not is_tagged else (kind,)
