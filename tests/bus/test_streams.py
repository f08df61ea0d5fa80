import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import SetupError
from schemas.subjects import DEAD_STREAM, REPLIES_STREAM, Lane, Stage, prefill_subject, stream_name
from services.bus import streams
from services.bus.connection import Bus, NoResponder
from services.bus.jetstream import Refused, call, publish_stored
from services.bus.server import NatsServer
from services.bus.streams import Source, ensure_consumers, ensure_streams, set_up
from tests.bus.conftest import BUILD, SETTINGS, MakeBus


async def config_of(bus: Bus, stream: str) -> dict:
    return (await call(bus, f"STREAM.INFO.{stream}"))["config"]


async def test_the_streams_are_those_of_the_design(bus: Bus, model: str) -> None:
    prefill = await config_of(bus, stream_name(Stage.PREFILL, model))
    assert prefill["subjects"] == [prefill_subject("*", model, lane) for lane in Lane]
    assert (prefill["retention"], prefill["discard"]) == ("workqueue", "new")
    assert (prefill["max_msgs"], prefill["max_bytes"]) == (1_000_000, 4_000_000_000)
    for stage in (Stage.REWORK, Stage.DECODE):
        queue = await config_of(bus, stream_name(stage, model))
        assert (queue["retention"], queue["max_msgs"], queue["max_bytes"]) == ("workqueue", -1, -1)
    replies = await config_of(bus, REPLIES_STREAM)
    assert (replies["retention"], replies["discard"], replies["allow_direct"]) == ("limits", "new", True)
    assert (replies["max_age"], replies["max_bytes"]) == (7200 * 10**9, 8_000_000_000)
    assert replies["persist_mode"] == "async"
    assert (await config_of(bus, DEAD_STREAM))["discard"] == "old"


async def test_consumers_never_give_up_and_are_not_bounded(bus: Bus, model: str) -> None:
    for stage in Stage:
        for lane in Lane:
            source = Source(stage, lane, model, BUILD)
            info = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
            config = info["config"]
            assert config["ack_wait"] == int(SETTINGS.ack_wait_s * 10**9)
            assert (config["max_deliver"], config["max_ack_pending"]) == (-1, -1)
            assert config["max_waiting"] > 512
            assert config["filter_subject"] == source.filter


async def test_many_processes_may_make_them_at_once(server: NatsServer, make_bus: MakeBus) -> None:
    buses = [await make_bus(server.url) for _ in range(4)]
    await asyncio.gather(*(ensure_streams(bus, "together") for bus in buses))
    await asyncio.gather(*(ensure_consumers(bus, "together", BUILD) for bus in buses))


async def test_two_builds_share_the_queue_of_a_model(bus: Bus, model: str) -> None:
    await ensure_consumers(bus, model, "ba9876543210")
    await ensure_consumers(bus, model, BUILD)


async def test_changed_limits_take_effect_and_messages_stay(
    bus: Bus, model: str, server: NatsServer, make_bus: MakeBus
) -> None:
    await publish_stored(bus, prefill_subject("default", model, Lane.BATCH), b"{}")
    smaller = await make_bus(server.url, msgspec.structs.replace(SETTINGS, queue_max_messages=7))
    await ensure_streams(smaller, model)
    info = await call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, model)}")
    assert info["config"]["max_msgs"] == 7
    assert info["state"]["messages"] == 1
    await ensure_streams(bus, model)
    assert (await config_of(bus, stream_name(Stage.PREFILL, model)))["max_msgs"] == 1_000_000


async def test_a_command_that_comes_and_goes_makes_streams_and_changes_none(
    bus: Bus, model: str, server: NatsServer, make_bus: MakeBus
) -> None:
    guest = await make_bus(server.url, msgspec.structs.replace(SETTINGS, queue_max_messages=7))
    await set_up(guest, model, adjusts=False)
    assert (await config_of(bus, stream_name(Stage.PREFILL, model)))["max_msgs"] == 1_000_000
    await set_up(guest, "guests", adjusts=False)
    assert (await config_of(bus, stream_name(Stage.PREFILL, "guests")))["max_msgs"] == 7


async def test_what_correctness_rests_on_is_repaired(bus: Bus, model: str) -> None:
    name = stream_name(Stage.PREFILL, model)
    config = await config_of(bus, name)
    await call(bus, f"STREAM.UPDATE.{name}", config | {"discard": "old", "subjects": [f"kvrelay.prefill.*.{model}.*"]})
    await ensure_streams(bus, model)
    config = await config_of(bus, name)
    assert config["discard"] == "new"
    with pytest.raises(NoResponder):
        await publish_stored(bus, f"kvrelay.prefill.default.{model}.nolane", b"{}")


async def test_a_stream_of_another_kind_is_named_and_left_alone(bus: Bus) -> None:
    name = stream_name(Stage.PREFILL, "taken")
    await call(bus, f"STREAM.CREATE.{name}", {"name": name, "subjects": ["taken"], "retention": "limits"})
    with pytest.raises(SetupError, match=name):
        await ensure_streams(bus, "taken")
    assert (await config_of(bus, name))["retention"] == "limits"


async def test_who_starts_while_the_broker_is_away_waits_for_it(own_server: NatsServer, make_bus: MakeBus) -> None:
    bus = await make_bus(own_server.url)
    broke = asyncio.Event()
    bus.on_connection(down=broke.set)
    own_server.kill()
    await broke.wait()
    starting = asyncio.create_task(set_up(bus, "late", BUILD))
    await asyncio.to_thread(own_server.start)
    await starting
    consumers = await call(bus, f"CONSUMER.LIST.{stream_name(Stage.DECODE, 'late')}")
    assert len(consumers["consumers"]) == len(Lane)


@pytest.mark.parametrize("stays", [False, True])
async def test_files_that_are_in_the_way_are_waited_for(
    own_server: NatsServer, make_bus: MakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """As when the server still removes a stream of the same name."""
    bus = await make_bus(own_server.url)
    await ensure_streams(bus, "first")
    name = stream_name(Stage.PREFILL, "next")
    (folder,) = tmp_path.rglob(stream_name(Stage.PREFILL, "first"))
    in_the_way = folder.with_name(name)
    refused = 0

    async def watched(*args: Any) -> dict[str, Any]:
        nonlocal refused
        try:
            if stays or not refused:
                in_the_way.write_text("", encoding="utf-8")  # the server removes it when it refuses
            return await call(*args)
        except Refused:
            refused += 1
            raise

    monkeypatch.setattr(streams, "call", watched)
    monkeypatch.setattr(streams, "CREATE_PAUSE_S", 0.01)
    if stays:
        with pytest.raises(SetupError, match=f"{name} cannot be made: .*creating store"):
            await ensure_streams(bus, "next")
    else:
        await ensure_streams(bus, "next")
    assert refused == (streams.CREATE_TRIES if stays else 1)
