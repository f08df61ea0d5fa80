"""Requests to the upstream, and its errors as ours."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from schemas.errors import InvalidRequest, SetupError, UpstreamTimeout, UpstreamUnavailable
from schemas.openai import error_body
from services import telemetry
from services.gateway.course import HERE, SERVE_HEADER
from services.gateway.envelope import REQUEST_ID, REQUEST_ID_HEADER, REQUEST_KEY
from services.gateway.wishes import IDEMPOTENCY_KEY_HEADER
from services.settings import Upstream

CONNECT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 65_536
MAX_SAID_CHARS = 500
EVENTS = "text/event-stream"
CLIENTS_FAULT = (400, 404, 409, 413, 422, 429)  # goes to the client as it is; any other error is not its own


class Refused(Exception):
    """The upstream's own answer to a request that it does not like."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(f"the upstream answered {status}")
        self.status = status
        self.body = body
        self.headers = headers


class UpstreamClient:
    """Made in a running loop; `close` it. Raises `SetupError` for a key file that cannot be read."""

    def __init__(self, settings: Upstream) -> None:
        self._base = settings.url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", SERVE_HEADER: HERE}  # no upstream of ours sends it on
        if settings.api_key_file:
            self._headers["Authorization"] = f"Bearer {_key(settings.api_key_file)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=settings.timeout_s)
        self._timeout_s = settings.timeout_s
        # Streams may be many, and each is a connection.
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator["UpstreamAnswer"]:
        """A good answer, to be read; leaving early closes the connection, at which the upstream stops.

        Raises `Refused`, `UpstreamUnavailable` or `UpstreamTimeout`.
        """
        with translated(self._timeout_s):
            response = await self._session.post(
                self._base + path, data=body, headers={**self._headers, **headers}, allow_redirects=False
            )
        try:
            if response.status != 200:
                with translated(self._timeout_s):
                    raise await _refusal(response)
            yield UpstreamAnswer(response, self._timeout_s)
        finally:
            if response.content.is_eof():
                response.release()
            else:
                response.close()


class UpstreamAnswer:
    """Read once. Each read raises `UpstreamUnavailable` or `UpstreamTimeout`."""

    def __init__(self, response: aiohttp.ClientResponse, timeout_s: float) -> None:
        self._response = response
        self._timeout_s = timeout_s
        self.is_stream = response.content_type == EVENTS

    async def parts(self) -> AsyncIterator[bytes]:
        """As they come."""
        while True:
            with translated(self._timeout_s):
                part = await self._response.content.readany()
            if not part:
                return
            yield part

    async def whole(self) -> bytes:
        """A JSON answer."""
        if self._response.content_type != "application/json":
            raise UpstreamUnavailable(f"the upstream answered {self._response.content_type[:80]!r} instead of JSON")
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise UpstreamUnavailable(f"the upstream's answer is larger than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)


@contextlib.contextmanager
def translated(timeout_s: float) -> Iterator[None]:
    """Around what talks to the upstream and to nobody else: aiohttp has the same errors for our own clients."""
    try:
        yield
    except (aiohttp.ServerTimeoutError, TimeoutError) as error:
        raise UpstreamTimeout(f"the upstream said nothing for {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise UpstreamUnavailable(f"the upstream is out of reach, or broke off: {type(error).__name__}") from error


def headers_of(request: web.Request) -> dict[str, str]:
    """What the upstream is told of the request beside its body. Its client's credentials are no business of it."""
    told = {REQUEST_ID_HEADER: request[REQUEST_ID] or request[REQUEST_KEY], **telemetry.inject()}
    if key := request.headers.get(IDEMPOTENCY_KEY_HEADER):
        told[IDEMPOTENCY_KEY_HEADER] = key
    return told


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    status, body = response.status, await response.content.read(MAX_ERROR_BYTES)
    said, is_openai = _said(body)
    if status in (401, 403):
        return UpstreamUnavailable("the upstream does not accept our key (upstream.api_key_file)")
    if status in CLIENTS_FAULT and said:
        kept = {name: response.headers[name] for name in ("Retry-After",) if name in response.headers}
        wrapped = body if is_openai else msgspec.json.encode(error_body(InvalidRequest(said)))
        return Refused(status, wrapped, kept)
    kind = UpstreamTimeout if status in (408, 504) else UpstreamUnavailable
    return kind(f"the upstream answered {status}{': ' + said if said else ''}")


def _said(body: bytes) -> tuple[str, bool]:
    """The message of an error, "" if it has none; and whether it is in OpenAI's shape."""
    try:
        found = json.loads(body)
    except ValueError:
        return "", False
    if not isinstance(found, dict):
        return "", False
    error = found.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"][:MAX_SAID_CHARS], True
    said = next((found[name] for name in ("message", "detail", "error") if found.get(name)), "")
    return str(said)[:MAX_SAID_CHARS], False


def _key(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise SetupError(f"upstream.api_key_file: {file} cannot be read", param="upstream.api_key_file") from error
    if not key or not key.isascii() or not key.isprintable():
        raise SetupError(f"upstream.api_key_file: {file} holds no key", param="upstream.api_key_file")
    return key
