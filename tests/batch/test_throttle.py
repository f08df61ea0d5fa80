"""Batches take what others leave, told from real beats."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from schemas.beat import Beat
from services.batch.throttle import Throttle
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.server import NatsServer
from tests.bus.throwaway import throwaway_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("throttle")) as running:
        yield running


class Decoder:
    def __init__(self, bus: Bus, capacity: int) -> None:
        self.running = 0
        self._capacity = capacity
        self.publisher = BeatPublisher(bus, self._beat)

    def _beat(self) -> Beat:
        return Beat(process="d", role="decode", state="ok", model="m", running=self.running, capacity=self._capacity)


@contextlib.asynccontextmanager
async def heard(server: NatsServer, capacity: int) -> AsyncIterator[tuple[Throttle, Decoder, BeatTable]]:
    async with await Bus.connect(server.url, "test") as bus:
        table, decoder = BeatTable(bus), Decoder(bus, capacity)
        await table.start()
        await decoder.publisher.start()
        await table.wait_for(lambda beats: bool(beats.alive()))
        yield Throttle(table, {"m"}), decoder, table
        await decoder.publisher.close()
        await table.close()


async def test_a_part_stays_free(server: NatsServer) -> None:
    async with heard(server, 16) as (throttle, _, _):
        assert throttle.allowed == 12
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(12):
                await stack.enter_async_context(throttle.place())
            waiting = asyncio.create_task(stack.enter_async_context(throttle.place()))
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()


async def test_others_come_first(server: NatsServer) -> None:
    async with heard(server, 16) as (throttle, decoder, table):
        decoder.running = 10
        await decoder.publisher.beat()
        await table.wait_for(lambda beats: beats.alive()[0].running == 10)
        throttle._look()
        assert throttle.allowed == 2
        decoder.running = 16
        await decoder.publisher.beat()
        await table.wait_for(lambda beats: beats.alive()[0].running == 16)
        throttle._look()
        assert throttle.allowed == 1, "a batch never stands still for ever"


async def test_without_workers_nothing_is_begun(server: NatsServer) -> None:
    async with await Bus.connect(server.url, "test") as bus:
        table = BeatTable(bus)
        await table.start()
        assert Throttle(table, {"m"}).allowed == 0
        await table.close()


async def test_a_prefill_worker_has_one_of_ours_at_a_time(server: NatsServer) -> None:
    async with heard(server, 16) as (throttle, _, _):
        async with throttle.turn():
            waiting = asyncio.create_task(throttle.turn().__aenter__())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
