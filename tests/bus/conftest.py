"""One nats-server a module, on a free port; a connection and a model of its own for each test."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.bus.streams import ensure_consumers, ensure_streams
from services.settings import Bus as BusSettings
from tests.bus.throwaway import throwaway_server

BUILD = "0123456789ab"
ACK_WAIT_S = 0.6
SETTINGS = BusSettings(ack_wait_s=ACK_WAIT_S, max_payload_bytes=65_536)

_numbers = itertools.count()

MakeBus = Callable[..., Awaitable[Bus]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("bus"), settings=SETTINGS) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """For tests that stop it."""
    with throwaway_server(tmp_path, settings=SETTINGS) as running:
        yield running


@pytest.fixture
async def make_bus() -> AsyncIterator[MakeBus]:
    """Connections that are closed with the test."""
    made: list[Bus] = []

    async def make(url: str, settings: BusSettings = SETTINGS) -> Bus:
        made.append(await Bus.connect(url, name=f"test-{len(made)}", settings=settings))
        return made[-1]

    yield make
    for bus in reversed(made):
        await bus.close()


@pytest.fixture
def ack_wait_s() -> float:
    """Of the consumers that `model` has. More, by parametrize, for a claim that must outlive pauses of the machine."""
    return ACK_WAIT_S


@pytest.fixture
async def bus(server: NatsServer, make_bus: MakeBus, ack_wait_s: float) -> Bus:
    return await make_bus(server.url, msgspec.structs.replace(SETTINGS, ack_wait_s=ack_wait_s))


@pytest.fixture
async def model(bus: Bus) -> str:
    """A model that no other test uses, with its streams and the consumers of `BUILD`."""
    name = f"m{next(_numbers)}"
    await ensure_streams(bus, name)
    await ensure_consumers(bus, name, BUILD)
    return name


@pytest.fixture
def job() -> str:
    """A job id that no other test uses."""
    return f"job-{next(_numbers)}"
