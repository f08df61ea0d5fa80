"""A broker for tests: nobody wants its data afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.bus.server import NatsServer
from services.settings import Bus as BusSettings


@contextmanager
def throwaway_server(folder: Path, settings: BusSettings | None = None) -> Iterator[NatsServer]:
    """Killed in the end: a server that leaves in good order first puts its streams in order, which takes seconds."""
    with NatsServer(folder, settings=settings) as server:
        yield server
        server.kill()
