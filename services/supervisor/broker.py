"""The embedded servers as children of the supervisor."""

from collections.abc import Callable

from services.bus.server import NatsServer
from services.config import Settings
from services.supervisor.child import tethered
from services.supervisor.kept_server import KeptServer
from services.supervisor.valkey import ValkeyServer


class Broker(KeptServer):
    def __init__(self, settings: Settings, on_start: Callable[[], None]) -> None:
        server = NatsServer(settings.kv.data_dir, settings=settings.bus, wrapper=tethered())
        super().__init__("nats", server, on_start)


class BlockServer(KeptServer):
    """The embedded Valkey. Its blocks die with it; workers compute them again."""

    def __init__(self, settings: Settings, on_start: Callable[[], None]) -> None:
        super().__init__("valkey", ValkeyServer(settings.kv, wrapper=tethered()), on_start)
