"""Jobs in the queues of builds that are gone: each is answered, and no worker that is there loses one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.beat import Beat, ProcessRole
from schemas.events import Error
from schemas.handoff import Handoff, parse_handoff
from schemas.job import Sampling
from schemas.subjects import Lane, Stage, beat_subject, decode_subject, rework_subject, stream_name
from schemas.wire import encode
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.depth import queued_sources
from services.bus.history import last_message
from services.bus.jetstream import call
from services.bus.publish import publish_handoff
from services.bus.queue import WorkQueue
from services.bus.streams import Source, ensure_streams
from services.worker import strays
from services.worker.strays import Strays
from tests.bus.polling import until
from tests.worker.conftest import BUILD

GONE = "dead00000000"


def handoff(job: str, build: str, **changes: Any) -> Handoff:
    fields: dict[str, Any] = {
        "tenant": "acme", "job": job, "origin": "1-1", "digest": "d", "build": build, "hop": 1, "last": 0,
        "timeout_left_s": 60.0, "ttft_left_s": 50.0, "prompt_token_ids": [1, 2],
        "sampling": Sampling(seed=1, max_tokens=4), "first": [], "stored_blocks": 1, "cached_tokens": 0,
    }  # fmt: skip
    return Handoff(**{**fields, **changes})


async def beat(bus: Bus, table: BeatTable, model: str, role: ProcessRole, build: str) -> None:
    said = Beat(process=f"{role}-{model}-{build}", role=role, state="ok", model=model, build=build)
    await bus.publish(beat_subject(said.process), encode(said))
    await table.wait_for(lambda table: table.get(said.process) is not None)


async def end_of(bus: Bus, job: str) -> Error:
    stored = await last_message(bus, "acme", job)
    assert stored is not None
    (event,) = stored.events
    assert isinstance(event, Error)
    return event


@pytest.fixture
async def table(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BeatTable]:
    monkeypatch.setattr(strays, "NOTHING_LEFT_S", 0.3)
    beats = BeatTable(bus)
    await beats.start()
    yield beats
    await beats.close()


async def test_jobs_of_a_silent_build_end_and_others_do_not(
    bus: Bus, table: BeatTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either queue and both lanes; a build that was heard within the time is left alone."""
    await ensure_streams(bus, "silent")
    await publish_handoff(bus, handoff("gone-1", GONE), "silent", Lane.INTERACTIVE)
    await publish_handoff(bus, handoff("gone-2", GONE), "silent", Lane.BATCH)
    await publish_handoff(bus, handoff("gone-3", GONE), "silent", Lane.BATCH, Stage.REWORK)
    await publish_handoff(bus, handoff("lives", BUILD), "silent", Lane.BATCH)
    finder = Strays(bus, table, "silent")
    await finder.look()
    assert len(await queued_sources(bus, Stage.DECODE, "silent")) == 3, "nobody has been silent for long yet"
    monkeypatch.setattr(strays, "BUILD_SILENT_AFTER_S", -1.0)
    monkeypatch.setattr(table, "build_silent_s", lambda model, build: 0.0 if build == GONE else -2.0)
    await finder.look()
    for number in (1, 2, 3):
        assert (await end_of(bus, f"gone-{number}")).code == "build_gone"
    assert await last_message(bus, "acme", "lives") is None
    assert await queued_sources(bus, Stage.REWORK, "silent") == []
    assert await queued_sources(bus, Stage.DECODE, "silent") == [Source(Stage.DECODE, Lane.BATCH, "silent", BUILD)]


async def test_rework_that_nobody_does_goes_on_to_decode(
    bus: Bus, table: BeatTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "REWORK_WAIT_S", -1.0)
    await ensure_streams(bus, "rework")
    await publish_handoff(bus, handoff("again", BUILD, hop=5), "rework", Lane.INTERACTIVE, Stage.REWORK)
    await beat(bus, table, "rework", "prefill", BUILD)
    await beat(bus, table, "rework", "decode", BUILD)
    finder = Strays(bus, table, "rework")
    await finder.look()
    assert len(await queued_sources(bus, Stage.REWORK, "rework")) == 1, "a prefill worker takes it"
    monkeypatch.setattr(table, "working", lambda *_: [])
    await finder.look()
    assert await queued_sources(bus, Stage.REWORK, "rework") == []
    queue = WorkQueue(bus, [Source(Stage.DECODE, Lane.INTERACTIVE, "rework", BUILD)])
    delivery = await queue.next()
    passed_on = parse_handoff(delivery.data)
    assert (passed_on.job, passed_on.hop, passed_on.reworked, passed_on.stored_blocks) == ("again", 6, True, 0)
    assert 0 < passed_on.timeout_left_s <= 60.0
    assert passed_on.ttft_left_s is not None and passed_on.ttft_left_s <= 50.0
    delivery.abandon()
    await queue.close()


async def test_what_cannot_be_read_ends_too(bus: Bus, table: BeatTable, monkeypatch: pytest.MonkeyPatch) -> None:
    await ensure_streams(bus, "junk")
    monkeypatch.setattr(strays, "REWORK_WAIT_S", -1.0)
    await bus.request(rework_subject("junk", BUILD, Lane.BATCH), b'{"tenant": "acme", "job": "junk-1"}')
    await beat(bus, table, "junk", "decode", BUILD)
    await Strays(bus, table, "junk").look()
    assert (await end_of(bus, "junk-1")).code == "invalid_request"
    monkeypatch.setattr(strays, "BUILD_SILENT_AFTER_S", -1.0)
    await bus.request(decode_subject("junk", GONE, Lane.BATCH), b'{"tenant": "acme", "job": "junk-2", "v": 9}')
    await Strays(bus, table, "junk").look()
    assert (await end_of(bus, "junk-2")).code == "build_gone"


async def test_a_job_that_somebody_takes_over_meanwhile_is_not_ended(
    bus: Bus, table: BeatTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is held by a worker whose beats we do not hear."""
    await ensure_streams(bus, "held")
    await publish_handoff(bus, handoff("held", GONE), "held", Lane.INTERACTIVE)
    queue = WorkQueue(bus, [Source(Stage.DECODE, Lane.INTERACTIVE, "held", GONE)])
    delivery = await queue.next()
    monkeypatch.setattr(strays, "BUILD_SILENT_AFTER_S", -1.0)
    await Strays(bus, table, "held").look()
    assert await last_message(bus, "acme", "held") is None
    delivery.abandon()
    await queue.close()

    async def is_empty() -> bool:
        await Strays(bus, table, "held").look()
        return int((await call(bus, f"STREAM.INFO.{stream_name(Stage.DECODE, 'held')}"))["state"]["messages"]) == 0

    await until(is_empty)
    assert (await end_of(bus, "held")).code == "build_gone"
