"""The embedded servers as children of the supervisor."""

import contextlib
import logging
from collections.abc import Callable

from schemas.errors import SetupError
from services.bus.server import NatsServer
from services.config import Settings
from services.supervisor.child import tethered
from services.supervisor.kept_server import KeptServer
from services.supervisor.valkey import ValkeyServer

RETRY_S = 30.0

_log = logging.getLogger("kvrelay.supervisor")


class Broker(KeptServer):
    def __init__(self, settings: Settings, on_start: Callable[[], None]) -> None:
        server = NatsServer(settings.kv.data_dir, settings=settings.bus, wrapper=tethered())
        super().__init__("nats", server, on_start)


class BlockServer(KeptServer):
    """The embedded Valkey. Its blocks die with it; workers compute them again."""

    async def keep(self) -> None:
        """Never gives up: the pipeline answers without it."""
        while True:
            try:
                return await super().keep()
            except SetupError as error:
                _log.error("%s; trying again in %.0f s", error.message, RETRY_S)
            if await self._stopped_within(RETRY_S):
                return
            with contextlib.suppress(SetupError):  # `keep` finds it dead
                self.start()

    def __init__(self, settings: Settings, on_start: Callable[[], None]) -> None:
        super().__init__("valkey", ValkeyServer(settings.kv, wrapper=tethered()), on_start)
