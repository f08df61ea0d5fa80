"""Server-sent events as a strict reader takes them (WHATWG HTML, section 9.2)."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple


class SseEvent(NamedTuple):
    id: str
    data: str


def parse(text: str) -> list[SseEvent]:
    """The events of a stream, which may be cut anywhere. Fails on a line that is no field, comment or blank."""
    found, id_, data = [], "", ""
    for line in text.split("\n")[:-1]:
        name, _, value = line.partition(": ")
        if line and not line.startswith(":"):
            assert name in ("id", "data", "retry"), line
            id_ = value if name == "id" else id_
            data = value if name == "data" else data
        elif not line and data:
            found.append(SseEvent(id_, data))
            data = ""
    return found


async def events(response: Any) -> AsyncIterator[SseEvent]:
    """As they come."""
    rest = b""
    async for part in response.content.iter_any():
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            for found in parse(event.decode() + "\n\n"):
                yield found
