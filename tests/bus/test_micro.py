"""`nats micro ping | info | stats`, as NATS's own library reads the answers."""

import asyncio
import json
import time
from typing import Any

import nats.micro.service as micro
import pytest

from schemas.beat import Beat, ProcessRole
from services.bus.connection import Bus
from services.bus.micro import MicroService, Tally
from tests.bus.conftest import BUILD, MakeBus


def beat_of(role: ProcessRole, process: str, model: str = "tiny", build: str = BUILD) -> Beat:
    return Beat(process=process, role=role, state="ok", model=model, build=build, running=2, capacity=4)


async def answers(bus: Bus, subject: str, num: int) -> list[dict[str, Any]]:
    """The first `num` that answer."""
    found: asyncio.Queue[bytes] = asyncio.Queue()
    reply = bus.expect(lambda message: found.put_nowait(message.data if message is not None else b""))
    await bus.publish(subject, b"", reply=reply)
    told = [json.loads(await found.get()) for _ in range(num)]
    bus.forget(reply)
    return sorted(told, key=lambda one: str(one["id"]))


async def test_everybody_a_service_or_one_process_answers(make_bus: MakeBus, server: Any) -> None:
    bus = await make_bus(server.url)
    beats = [beat_of("prefill", "prefill-1"), beat_of("decode", "decode-1"), beat_of("decode", "decode-2")]
    services = [MicroService(bus, lambda beat=beat: (beat, Tally())) for beat in beats]
    for service in services:
        await service.start()
    assert [one["id"] for one in await answers(bus, "$SRV.PING", 3)] == ["decode-1", "decode-2", "prefill-1"]
    assert [one["id"] for one in await answers(bus, "$SRV.PING.kvrelay-decode", 2)] == ["decode-1", "decode-2"]
    (one,) = await answers(bus, "$SRV.PING.kvrelay-decode.decode-2", 1)
    ping = micro.ServicePing(**{name: value for name, value in one.items() if name != "type"})
    assert (one["type"], ping.id) == (micro.PING_RESPONSE_TYPE, "decode-2")
    assert micro.SEMVER_REGEX.match(ping.version) and micro.NAME_REGEX.match(ping.name)
    for service in services:
        await service.close()
    with pytest.raises(Exception, match="nobody listens"):
        await bus.request("$SRV.PING")


async def test_info_names_what_a_process_listens_to(bus: Bus) -> None:
    beats = {"both-1": beat_of("both", "both-1"), "new-1": beat_of("prefill", "new-1", "", "")}
    beats["gateway-1"] = Beat(process="gateway-1", role="gateway", state="ok")
    for beat in beats.values():
        await MicroService(bus, lambda beat=beat: (beat, Tally())).start()
    told = {one["id"]: micro.ServiceInfo.from_dict(one) for one in await answers(bus, "$SRV.INFO", 3)}
    assert [(e.name, e.subject, e.queue_group) for e in told["both-1"].endpoints] == [
        ("prefill", "kvrelay.prefill.*.tiny.*", "KVRELAY_PREFILL_tiny"),
        ("decode", f"kvrelay.decode.tiny.{BUILD}.*", "KVRELAY_DECODE_tiny"),
    ]
    assert told["both-1"].metadata == {"state": "ok", "model": "tiny", "build": BUILD}
    assert told["new-1"].endpoints == []
    assert [e.subject for e in told["gateway-1"].endpoints] == ["kvrelay.watched.*.*"]


async def test_stats_count_what_was_done(bus: Bus) -> None:
    tally, began_ns = Tally(), time.perf_counter_ns()
    for error in ("", "invalid_request", ""):
        tally.note("decode", began_ns, error)
    await MicroService(bus, lambda: (beat_of("decode", "decode-9"), tally)).start()
    (one,) = await answers(bus, "$SRV.STATS.kvrelay-decode.decode-9", 1)
    told = micro.ServiceStats.from_dict(one)
    (endpoint,) = told.endpoints
    assert (endpoint.num_requests, endpoint.num_errors, endpoint.last_error) == (3, 1, "invalid_request")
    assert 0 < endpoint.average_processing_time <= endpoint.processing_time
    assert endpoint.data is not None and endpoint.data["running"] == 2
