import asyncio
import gc
import time

import pytest

from schemas.errors import BusUnavailable, Internal, SetupError, TooLarge
from services.bus.clock import BrokerClock, elapsed_s
from services.bus.connection import Bus, NoResponder
from services.bus.message import header_bytes
from services.bus.server import NatsServer
from services.bus.streams import ensure_streams
from tests.bus.conftest import MakeBus


async def echo_on(bus: Bus, subject: str) -> None:
    async def echo(message) -> None:
        await bus.publish(message.reply, message.data)

    await bus.subscribe(subject, echo)


async def test_header_and_payload_together_count_against_the_limit(bus: Bus) -> None:
    await echo_on(bus, "echo")
    headers = {"Kvrelay-Claim": "prefill.0.1", "traceparent": "é" * 10}
    room = bus.max_payload - header_bytes(headers)
    message = await bus.request("echo", b"x" * room, headers)
    assert len(message.data) == room
    with pytest.raises(TooLarge, match=f"max_payload\\) is {bus.max_payload}"):
        await bus.request("echo", b"x" * (room + 1), headers)
    with pytest.raises(TooLarge):
        await bus.publish("echo", b"x" * (bus.max_payload + 1))
    assert (await bus.request("echo", b"still here")).data == b"still here"
    assert bus.num_reconnects == 0


async def test_reconnects_after_an_error_that_nats_py_would_close_for(bus: Bus, server: NatsServer) -> None:
    await echo_on(bus, "echo.again")
    came_back = asyncio.Event()
    bus.on_connection(up=came_back.set)
    await bus._client.publish("echo.again", b"x", headers={"h": "x" * bus.max_payload})  # past our fence
    async with asyncio.timeout(10):
        await came_back.wait()
    assert (await bus.request("echo.again", b"x")).data == b"x"


async def test_fails_at_once_while_the_broker_is_away_and_goes_on_when_it_is_back(
    own_server: NatsServer, make_bus: MakeBus
) -> None:
    bus = await make_bus(own_server.url)
    await echo_on(bus, "echo")
    events: asyncio.Queue[str] = asyncio.Queue()
    bus.on_connection(up=lambda: events.put_nowait("up"), down=lambda: events.put_nowait("down"))
    bus.on_connection(up=lambda: events.put_nowait("first"), first=True)
    unanswered = asyncio.create_task(bus.request("_silent", timeout_s=60))

    async def silent(message) -> None: ...

    await bus.subscribe("_silent", silent)
    unanswered = asyncio.create_task(bus.request("_silent", timeout_s=60))
    await bus.request("echo", b"")
    own_server.kill()
    async with asyncio.timeout(10):
        assert await events.get() == "down"
        with pytest.raises(BusUnavailable):
            await unanswered
    with pytest.raises(BusUnavailable):
        await bus.request("echo", b"x")
    own_server.start()
    async with asyncio.timeout(10):
        assert [await events.get(), await events.get()] == ["first", "up"]
        await bus.wait_connected()
    assert (await bus.request("echo", b"x")).data == b"x"


async def test_no_responder_bad_subject_and_timeout_are_told_apart(bus: Bus) -> None:
    with pytest.raises(NoResponder):
        await bus.request("nobody.home")
    with pytest.raises(Internal):
        await bus.publish("not a subject")

    async def silent(message) -> None: ...

    await bus.subscribe("silent", silent)
    with pytest.raises(BusUnavailable, match="did not answer"):
        await bus.request("silent", timeout_s=0.05)


async def test_requests_leave_nothing_behind(bus: Bus) -> None:
    await echo_on(bus, "echo.clean")
    subscriptions = len(bus._client._subs)
    await asyncio.gather(*(bus.request("echo.clean", b"x") for _ in range(50)))
    task = asyncio.create_task(bus.request("echo.clean", b"x"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(bus._inbox) == 0
    assert len(bus._client._subs) == subscriptions


async def test_nobody_there_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="no NATS server answers"):
        await Bus.connect("nats://127.0.0.1:1", timeout_s=0.3)


async def test_attempts_that_get_no_greeting_are_closed(own_server: NatsServer, make_bus: MakeBus) -> None:
    """A load balancer in front of a dead broker: it accepts, and hangs up. What stays open is an error of the suite."""
    bus = await make_bus(own_server.url)
    port = int(own_server.url.rpartition(":")[2])
    num_attempts = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_attempts
        num_attempts += 1
        writer.close()
        await writer.wait_closed()

    own_server.kill()
    async with await asyncio.start_server(hang_up, "127.0.0.1", port), asyncio.timeout(10):
        while num_attempts < 3:
            await asyncio.sleep(0.01)
    own_server.start()
    await bus.wait_connected(10)
    gc.collect()


async def test_now_follows_the_broker_and_not_the_local_clock(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await ensure_streams(bus, "clock")
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before + 3600)
    assert bus.clock.synced
    assert abs(bus.now() - before) < 60


def test_a_slow_answer_does_not_spoil_a_good_clock() -> None:
    clock = BrokerClock()
    now = elapsed_s()
    clock.set(1000.0, now, now + 0.001)
    good = clock.now()
    clock.set(2000.0, now, now + 5.0)
    assert abs(clock.now() - good) < 1
