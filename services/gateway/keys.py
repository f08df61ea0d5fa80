"""Who asks: the API key of a request, checked against the file of keys, names its tenant.

The file is looked at with each request (one stat, 2 us): a key that was added or revoked counts from the next one on.
A file that cannot be read any more changes nothing, and the log says so once: half an edit must not lock everybody out.
"""

import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from schemas.errors import SetupError, Unauthorized
from services.gateway.envelope import LOG_FIELDS, TENANT
from services.gateway.key_file import ApiKey, digest, id_of, read

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/", "/openapi.json"}
)  # they tell nothing of any request; the page asks for a key itself

_NOBODY = digest("")
_log = logging.getLogger("kvrelay.gateway")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Seen = tuple[int, int, int] | None


class Keys:
    """Of one file. Raises `SetupError` if it cannot be read at first."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._seen = self._look()
        self._by_id = {key.id: key for key in read(self._file)}

    def check(self, authorization: str | None) -> ApiKey:
        """The key in an Authorization header. Raises `Unauthorized`.

        How long that takes depends on nothing that the sender does not know.
        """
        scheme, _, sent = (authorization or "").strip().partition(" ")
        sent = sent.strip()
        if scheme.lower() != "bearer" or not sent:
            raise Unauthorized("no API key was sent: add the header Authorization: Bearer YOUR_KEY")
        self._reload()
        key = self._by_id.get(id_of(sent) or "")
        is_right = hmac.compare_digest(digest(sent), key.hash if key else _NOBODY)
        if key is None or not is_right:
            raise Unauthorized("the API key is not right: check for parts that are missing, or ask for a new one")
        if key.revoked is not None:
            raise Unauthorized("the API key was revoked: ask for a new one")
        return key

    def _reload(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._by_id = {key.id: key for key in read(self._file)}
        except SetupError as error:
            _log.error("the keys stay as they were: %s", error.message)
        else:
            _log.info("keys read", extra={"fields": {"file": str(self._file), "keys": len(self._by_id)}})

    def _look(self) -> _Seen:
        """What tells one version of the file from another."""
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def identified(keys: Keys | None, tenant: str) -> Middleware:
    """Says of every request whose it is. Without `keys` all are `tenant`'s."""

    @web.middleware
    async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[TENANT] = tenant
        if keys is not None and request.path not in OPEN_PATHS:
            key = keys.check(request.headers.get("Authorization"))
            request[TENANT] = key.tenant
            request[LOG_FIELDS].update(tenant=key.tenant, key=key.id)
        return await handler(request)

    return identify
