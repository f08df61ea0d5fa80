"""What a client says in headers about how its request is to be handled, and not what is asked."""

import hashlib
import re
from typing import NamedTuple

from aiohttp import web

from schemas.errors import InvalidRequest

IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Wishes(NamedTuple):
    """`idempotency_key`: "" or what makes a retry of this request the same request. `detached`: `Prefer: respond-async`
    (RFC 7240), the client comes back for the answer."""

    idempotency_key: str = ""
    detached: bool = False

    @classmethod
    def of(cls, request: web.Request) -> "Wishes":
        key = request.headers.get(IDEMPOTENCY_KEY_HEADER, "")
        if key and not _KEY.fullmatch(key):
            raise InvalidRequest(
                f"{IDEMPOTENCY_KEY_HEADER} must be 1 to 255 visible ASCII characters", param=IDEMPOTENCY_KEY_HEADER
            )
        preferences = ",".join(request.headers.getall("Prefer", [])).lower().split(",")
        return cls(key, any(preference.partition(";")[0].strip() == "respond-async" for preference in preferences))

    @property
    def request_key(self) -> str:
        """24 hex digits: what a client chose never becomes a name on the bus."""
        return hashlib.blake2b(self.idempotency_key.encode(), digest_size=12, person=b"kvrelay-idem").hexdigest()
