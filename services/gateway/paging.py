"""OpenAI's lists: `limit`, `after` and `order`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, TypedDict, TypeVar

from schemas.errors import InvalidRequest

MAX_LIMIT = 10_000
DEFAULT_LIMIT = 20

T = TypeVar("T")


class Page(TypedDict, Generic[T]):
    object: Literal["list"]
    data: Sequence[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(newest_first: Sequence[T], query: Mapping[str, str], id_of: Callable[[T], str]) -> Page[T]:
    """Raises `InvalidRequest`."""
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    if not limit.isdecimal() or len(limit) > len(str(MAX_LIMIT)) or not 1 <= int(limit) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {MAX_LIMIT}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    found = list(newest_first) if order == "desc" else list(reversed(newest_first))
    if after := query.get("after"):
        names = [id_of(item) for item in found]
        if after not in names:
            raise InvalidRequest(f"nothing in this list is called {after[:80]!r}", param="after")
        found = found[names.index(after) + 1 :]
    shown = found[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": id_of(shown[0]) if shown else None,
        "last_id": id_of(shown[-1]) if shown else None,
        "has_more": len(found) > len(shown),
    }
