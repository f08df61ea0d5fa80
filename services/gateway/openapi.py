"""The document at /openapi.json: OpenAPI 3.2, made from the table of operations and the types that the code uses."""

from collections import defaultdict
from types import UnionType
from typing import Any, get_args

import msgspec

from schemas.openai import ErrorBody
from schemas.version import own_version
from services.gateway.envelope import REQUEST_ID_HEADER
from services.gateway.operation import ANY_ROUTE, EVENTS, JSON, Answer, Operation, Parameter
from services.gateway.operations import OPERATIONS

_REQUEST_ID = Parameter(
    REQUEST_ID_HEADER, "header", str, "The client's name for the request; it comes back, and is logged."
)
_ABOUT = """\
Queue-driven LLM serving behind OpenAI's HTTP API. Fields of OpenAI's and vLLM's requests that are known and not
supported are refused by name, others are ignored unless `api.strict` is set.
"""


def document() -> dict[str, Any]:
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in OPERATIONS:
        paths[operation.path][operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.2.0",
        "info": {"title": "kvrelay", "version": own_version(), "description": _ABOUT},
        "paths": dict(paths),
        "components": {"schemas": schemas.components},
    }


class _Schemas:
    """The schema of each type in the table, which keeps them alive: `id` tells them apart.

    What a route answers in one of two shapes is a union that nobody ever decodes, so its structs have no tags; msgspec
    would ask for them, and so it gets them one by one.
    """

    def __init__(self) -> None:
        asked = [kind for operation in OPERATIONS for kind in _kinds(operation)]
        kinds = [one for kind in (ErrorBody, _REQUEST_ID.kind, *asked) for one in _shapes(kind)]
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        self._found = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}

    def of(self, kind: Any) -> dict[str, Any]:
        found = [self._found[id(one)] for one in _shapes(kind)]
        return found[0] if len(found) == 1 else {"anyOf": found}


def _shapes(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _kinds(operation: Operation) -> list[Any]:
    answered = [kind for answer in operation.answers for kind in answer.kinds.values()]
    used = [operation.body, *(parameter.kind for parameter in operation.parameters), *answered]
    return [kind for kind in used if kind is not None]


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.doc,
        "parameters": [_parameter(parameter, schemas) for parameter in (*operation.parameters, _REQUEST_ID)],
        "responses": _errors(operation, schemas) | {str(a.status): _answer(a, schemas) for a in operation.answers},
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(operation.body)}}}
    elif operation.form is not None:
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    return made


def _parameter(parameter: Parameter, schemas: _Schemas) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.where == "path",
        "description": parameter.doc,
        "schema": schemas.of(parameter.kind),
    }


def _answer(answer: Answer, schemas: _Schemas) -> dict[str, Any]:
    made: dict[str, Any] = {"description": answer.doc, "headers": _HEADERS}
    if answer.kinds:
        made["content"] = {media: _content(media, kind, schemas) for media, kind in answer.kinds.items()}
    return made


def _content(media: str, kind: Any, schemas: _Schemas) -> dict[str, Any]:
    if kind is None:
        return {"schema": {"type": "string", "contentMediaType": media}}
    if media != EVENTS:
        return {"schema": schemas.of(kind)}
    told = {"contentMediaType": JSON, "contentSchema": {"anyOf": [schemas.of(kind), schemas.of(ErrorBody)]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, told]}
    event = {"data": data, "id": {"type": "string"}, "retry": {"type": "integer"}}
    return {"itemSchema": {"type": "object", "properties": event, "required": ["data"]}}


def _errors(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    """A response for each status, naming the codes that it may have."""
    codes: dict[int, list[str]] = defaultdict(list)
    for error in (*ANY_ROUTE, *operation.errors):
        if error.code not in codes[error.http_status]:
            codes[error.http_status].append(error.code)
    content = {JSON: {"schema": schemas.of(ErrorBody)}}
    return {
        str(status): {"description": " or ".join(f"`{c}`" for c in found), "headers": _HEADERS, "content": content}
        for status, found in sorted(codes.items())
    }


_HEADERS = {REQUEST_ID_HEADER: {"description": "The client's own, or ours.", "schema": {"type": "string"}}}
