"""What the committed documents say of a message on the bus."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parents[2] / "infra" / "schemas"


@cache
def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def channel_of(subject: str) -> str:
    """Raises `LookupError` unless it is one channel's."""
    known = document("subjects.schema.json")["$defs"]
    found = [name for name, schema in known.items() if re.search(schema["pattern"], subject)]
    if len(found) != 1:
        raise LookupError(f"{subject} is of {found or 'no channel'}")
    return found[0]


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator | None:
    made = document("asyncapi.json")
    payload = made["channels"][name]["messages"][name].get("payload")
    return payload and jsonschema.Draft202012Validator({**payload, "components": made["components"]})


def check(subject: str, payload: bytes) -> str:
    """The channel of a message. Raises unless the documents know it and its payload is as they say."""
    name = channel_of(subject)
    validator = _validator(name)
    if validator is not None:
        lines = document("asyncapi.json")["channels"][name]["messages"][name]["contentType"].endswith("ndjson")
        for part in payload.splitlines() if lines else [payload]:
            validator.validate(json.loads(part))
    return name
