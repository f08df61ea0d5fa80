"""Reads a request body, refusing by name what is not plain JSON in UTF-8 of a bounded size."""

import codecs

from aiohttp import web

from schemas.errors import InvalidRequest, TooLarge


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Raises `TooLarge` or `InvalidRequest`. What the client still sends of a refused body is not waited for."""
    _check_headers(request)
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.content.iter_any():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except web.RequestPayloadError as error:
        raise InvalidRequest("the request body is not framed as HTTP says") from error
    return b"".join(parts)


def _check_headers(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequest("compressed request bodies are not supported: send the JSON as it is")
    if request.headers.get("Content-Type") is None or request.content_type != "application/json":
        raise InvalidRequest("Content-Type must be application/json")
    charset = request.charset or "utf-8"
    try:
        is_utf8 = codecs.lookup(charset).name in ("utf-8", "ascii")
    except LookupError:
        is_utf8 = False
    if not is_utf8:
        raise InvalidRequest(f"the charset must be utf-8, not {charset[:40]!r}")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {max_bytes} bytes (api.max_body_bytes)")
