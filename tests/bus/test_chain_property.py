"""Whatever is lost, doubled or late on the way, and however many writers there are: one stream, one end."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from schemas.errors import BusUnavailable, ClaimLost
from schemas.events import Event, Token, is_end
from schemas.subjects import EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, REPLIES_STREAM
from services.bus import hub as hub_module
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.hub import ReplyHub
from services.bus.jetstream import call
from services.bus.replies import ReplyWriter
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from tests.bus.conftest import MakeBus
from tests.bus.events import ending, token, whole
from tests.bus.polling import restart

NUM_TOKENS = 40
FAULTS = {"none": 8, "lost": 1, "ack lost": 1, "twice": 1, "late": 1, "refused": 1, "nobody": 1, "cut": 0.5}
NOT_THE_LAST = str(10**9)


class FaultyNetwork:
    """Stands before `bus.publish`: messages on reply subjects get lost, doubled, delayed, refused, lose their ack, or
    the connection with it."""

    def __init__(self, bus: Bus, seed: int) -> None:
        self.bus = bus
        self._publish = bus.publish
        self._random = random.Random(seed)
        self._late: set[asyncio.Task[None]] = set()
        self.open = asyncio.Event()  # closed, nothing is sent at all
        self.open.set()
        self.faults: Counter[str] = Counter()
        bus.publish = self  # type: ignore[method-assign]

    async def __call__(self, subject: str, payload: bytes = b"", headers=None, reply: str = "") -> None:
        await self.open.wait()
        if not subject.startswith("kvrelay.replies."):
            return await self._publish(subject, payload, headers, reply)
        fault = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.faults[fault] += 1
        if fault in ("none", "twice"):
            await self._publish(subject, payload, headers, reply)
        if fault in ("ack lost", "twice"):
            await self._publish(subject, payload, headers)
        if fault == "refused":
            wrong = {**headers, EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: NOT_THE_LAST}
            await self._publish(subject, payload, wrong, reply)
        if fault == "nobody":  # the stream is being moved or restarted
            await self._publish("nobody.listens", payload, headers, reply)
        if fault == "cut":
            await self._publish(subject, payload, headers, reply)
            self.bus._client._transport._io_writer.transport.abort()
        if fault == "late":
            copy = self._deliver_late(subject, payload, dict(headers), reply)
            self._late.add(asyncio.create_task(copy))
        return None

    async def _deliver_late(self, subject: str, payload: bytes, headers: dict[str, str], reply: str) -> None:
        await asyncio.sleep(self._random.uniform(0, 4 * hub_module.ACK_TIMEOUT_S))
        await self.bus.wait_connected()
        await self.open.wait()
        with contextlib.suppress(BusUnavailable):
            await self._publish(subject, payload, headers, reply)

    async def quiet(self) -> None:
        await asyncio.gather(*self._late)


async def worker(bus: Bus, job: str, delivery: int, chance: random.Random) -> None:
    """Continues a job from what is stored, as a worker does that got its message; may be taken over itself."""
    while True:
        # One read for both: a `last` from a later look would stand behind events that were not seen.
        try:
            messages = await read_all(bus, "default", job)
        except BusUnavailable:
            await bus.wait_connected()
            continue
        stored = [event for message in messages for event in message.events]
        if stored and is_end(stored[-1]):
            return
        seen = messages[-1].sequence if messages else 0
        num_tokens = sum(isinstance(event, Token) for event in stored)
        write = ReplyWriter(bus, "default", job, seen, f"decode.0.{delivery}")
        try:
            if not stored:
                write.put(whole(0)[0])
            for index in range(num_tokens, NUM_TOKENS):
                write.put(token(index))
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
                if chance.random() < 0.05:
                    await write.drained()
            write.put(*ending(NUM_TOKENS))
            await write.drained()
            return
        except ClaimLost:
            if write.published:
                return


async def lose_the_last(bus: Bus, job: str, networks: list[FaultyNetwork], num_messages: int) -> None:
    """As a broker does that crashes before they are on disk; afterwards each connection looks after its own."""
    for network in networks:
        network.open.clear()
        with contextlib.suppress(BusUnavailable):
            await network.bus._client.flush()
    for message in (await read_all(bus, "default", job))[-num_messages:]:
        await call(bus, f"STREAM.MSG.DELETE.{REPLIES_STREAM}", {"seq": message.sequence})
    for network in networks:
        network.open.set()
        network.bus.part(ReplyHub)._on_up()


async def stored_events(bus: Bus, job: str) -> list[Event]:
    return [event for message in await read_all(bus, "default", job) for event in message.events]


@pytest.mark.parametrize("num_writers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
async def test_one_stream_with_one_end(
    server: NatsServer, make_bus: MakeBus, monkeypatch: pytest.MonkeyPatch, seed: int, num_writers: int
) -> None:
    monkeypatch.setattr(hub_module, "ACK_TIMEOUT_S", 0.02)
    job = f"chain-{seed}-{num_writers}"
    buses = [await make_bus(server.url) for _ in range(num_writers)]
    await ensure_streams(buses[0], "m")
    networks = [FaultyNetwork(bus, seed + 100 * n) for n, bus in enumerate(buses)]
    async with asyncio.timeout(30):
        for round_ in range(20):
            workers = (worker(bus, job, round_ * 10 + n, random.Random(seed + n)) for n, bus in enumerate(buses))
            await asyncio.gather(*workers)
            stored = await stored_events(buses[0], job)
            if stored and is_end(stored[-1]):
                break
        for network in networks:
            await network.quiet()
    assert await stored_events(buses[0], job) == whole(NUM_TOKENS)
    assert sum((network.faults for network in networks), Counter()).total() > 3


@pytest.mark.parametrize("num_writers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
async def test_one_stream_with_one_end_while_events_get_lost(
    server: NatsServer, make_bus: MakeBus, monkeypatch: pytest.MonkeyPatch, seed: int, num_writers: int
) -> None:
    """On top of a bad network. A worker may be gone when its events are: the next one makes them again."""
    monkeypatch.setattr(hub_module, "ACK_TIMEOUT_S", 0.02)
    monkeypatch.setattr(hub_module, "REWIND_WAIT_S", 0.1)
    job = f"lost-{seed}-{num_writers}"
    buses = [await make_bus(server.url) for _ in range(num_writers)]
    onlooker = await make_bus(server.url)
    await ensure_streams(onlooker, "m")
    networks = [FaultyNetwork(bus, seed + 100 * n) for n, bus in enumerate(buses)]
    chance = random.Random(seed)
    num_losses = 0

    async def lose() -> None:
        nonlocal num_losses
        while num_losses < 5:
            await asyncio.sleep(chance.uniform(0.005, 0.03))
            await lose_the_last(onlooker, job, networks, chance.randrange(1, 4))
            num_losses += 1

    async with asyncio.timeout(60):
        losing = asyncio.create_task(lose())
        for round_ in range(100):
            workers = (worker(bus, job, round_ * 10 + n, random.Random(seed + n)) for n, bus in enumerate(buses))
            await asyncio.gather(*workers)
            stored = await stored_events(onlooker, job)
            if losing.done() and stored and is_end(stored[-1]):
                break
        for network in networks:
            await network.quiet()
    assert await stored_events(onlooker, job) == whole(NUM_TOKENS)


async def test_one_stream_with_one_end_while_the_broker_crashes(
    own_server: NatsServer, make_bus: MakeBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "REWIND_WAIT_S", 0.2)
    buses = [await make_bus(own_server.url) for _ in range(2)]
    await ensure_streams(buses[0], "m")
    jobs = [f"crash-{n}" for n in range(6)]

    async def crash() -> None:
        for _ in range(3):
            await asyncio.sleep(0.02)
            await restart(own_server, *buses)

    async def finish(job: str) -> None:
        for delivery in range(1, 100):
            bus = buses[delivery % 2]
            try:
                messages = await read_all(bus, "default", job)
            except BusUnavailable:
                await bus.wait_connected()
                continue
            stored = [event for message in messages for event in message.events]
            if stored and is_end(stored[-1]):
                return
            last = messages[-1].sequence if messages else 0
            write = ReplyWriter(bus, "default", job, last, f"decode.0.{delivery}")
            try:
                for event in whole(NUM_TOKENS)[len(stored) :]:
                    write.put(event)
                    await asyncio.sleep(0.002)
                await write.drained()
            except ClaimLost:
                continue

    async with asyncio.timeout(60):
        await asyncio.gather(crash(), *map(finish, jobs))
    for job in jobs:
        assert await stored_events(buses[0], job) == whole(NUM_TOKENS)
