"""A broker with little room for files and results; each test is a tenant of its own."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from services.batch.shelf import Shelf
from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from services.settings import Bus as BusSettings
from tests.bus.throwaway import throwaway_server

FILES_BYTES, RESULTS_BYTES = 3_000_000, 1_000_000
SETTINGS = BusSettings(files_max_bytes=FILES_BYTES, results_max_bytes=RESULTS_BYTES, sync_interval="2s")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("batch"), settings=SETTINGS) as running:
        yield running


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[Bus]:
    async with await Bus.connect(server.url, "test", SETTINGS) as bus:
        await ensure_streams(bus, "m")
        yield bus


@pytest.fixture
def tenant() -> str:
    return f"t{next(_numbers)}"


@pytest.fixture
def shelf(bus: Bus, tenant: str) -> Shelf:
    return Shelf(bus, tenant)
