"""What the API's document says of a route: its parts, each with the shape that the code reads or writes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.errors import Forbidden, Internal, InvalidRequest, KvrelayError, RequestTimeout, Unauthorized

JSON = "application/json"
EVENTS = "text/event-stream"

Errors = tuple[type[KvrelayError], ...]
"""Each with its own status and code."""

ANY_ROUTE: Errors = (InvalidRequest, Unauthorized, Forbidden, RequestTimeout, Internal)
"""What any route may answer: HTTP that is none is 400, too."""


@dataclass(frozen=True)
class Parameter:
    """`kind`: a type that msgspec knows. Those in a path are always required, all others never."""

    name: str
    where: Literal["path", "query", "header"]
    kind: Any
    doc: str


@dataclass(frozen=True)
class Answer:
    """`kinds`: media type -> the type of the body; of an event stream that of the data of its events. None: bytes.

    Without any there is no body.
    """

    status: int
    doc: str
    kinds: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """`path` is OpenAPI's: `/v1/models/{model}`. `body` is that of JSON requests, `form` the schema of a multipart."""

    method: Literal["get", "post", "delete"]
    path: str
    doc: str
    answers: tuple[Answer, ...]
    errors: Errors = ()
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    form: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """`post_v1_chat_completions`: what code generators call it."""
        words = "".join(character if character.isalnum() else " " for character in self.path).split()
        return "_".join([self.method, *words])


def json(status: int, doc: str, kind: Any) -> Answer:
    return Answer(status, doc, {JSON: kind})
