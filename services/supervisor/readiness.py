"""Asks the gateway's `/ready` whether the whole pipeline can work."""

import asyncio
import http.client
import logging
import ssl

import msgspec

from services.settings import Api

_log = logging.getLogger("kvrelay.supervisor")
_ASK_EVERY_S = 0.25
_TIMEOUT_S = 2.0


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/ready`; 200 for ok and degraded."""

    state: str
    reasons: list[str] = []


_decoder = msgspec.json.Decoder(Readiness)


def ask(api: Api) -> Readiness | None:
    """What `/ready` says now, None while nobody answers. Blocks for up to two seconds."""
    connection = http.client.HTTPConnection(api.host, api.port, timeout=_TIMEOUT_S)
    if api.tls_cert_file:  # it is our own child, and its certificate is for another name than this address
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(api.host, api.port, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/ready")
        return _decoder.decode(connection.getresponse().read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    finally:
        connection.close()


async def wait_until_ready(api: Api) -> Readiness:
    """Returns once the pipeline is ok or degraded; says in the log what it waits for, when that changes."""
    said: list[str] = []
    while True:
        found = await asyncio.to_thread(ask, api)
        if found is not None and found.state in ("ok", "degraded"):
            return found
        if found is not None and found.reasons != said:
            said = found.reasons
            _log.info("waiting", extra={"fields": {"state": found.state, "reasons": "; ".join(said)}})
        await asyncio.sleep(_ASK_EVERY_S)
