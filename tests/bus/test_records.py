"""Records on a stream: replaced only by who has seen the one before, read by filter, erased."""

import asyncio

import pytest

from schemas.subjects import BATCHES_STREAM, FILES_STREAM, batch_subject, file_subject
from services.bus import records
from services.bus.connection import Bus


@pytest.fixture
async def tenant(model: str) -> str:
    return f"t-{model}"


async def test_a_record_is_replaced_by_who_has_seen_it(bus: Bus, tenant: str) -> None:
    subject = batch_subject(tenant, "b")
    assert await records.get(bus, BATCHES_STREAM, subject) is None
    first = await records.put(bus, subject, b"1", 0)
    assert first is not None
    assert await records.put(bus, subject, b"x", 0) is None
    second = await records.put(bus, subject, b"2", first)
    assert second is not None and await records.put(bus, subject, b"x", first) is None
    found = await records.get(bus, BATCHES_STREAM, subject)
    assert found is not None and (found.payload, found.sequence) == (b"2", second)


async def test_the_latest_of_each(bus: Bus, tenant: str) -> None:
    for number in range(700):  # more than one read brings
        await records.put(bus, batch_subject(tenant, f"b{number}"), str(number).encode(), 0)
    found = await records.latest(bus, BATCHES_STREAM, batch_subject(tenant, "*"))
    assert sorted(int(record.payload) for record in found) == list(range(700))
    assert await records.latest(bus, BATCHES_STREAM, batch_subject("nobody", "*")) == []


async def test_all_of_a_filter_in_order_and_erased(bus: Bus, tenant: str) -> None:
    for part in range(3):
        await records.put(bus, file_subject(tenant, "f", part), bytes([part]), 0, {"X": str(part)})
    await records.put(bus, file_subject(tenant, "g", 0), b"other", 0)
    found, more = await records.read_some(bus, FILES_STREAM, file_subject(tenant, "f", "*"))
    assert not more and [(r.payload, r.headers["X"]) for r in found] == [(b"\0", "0"), (b"\1", "1"), (b"\2", "2")]
    rest, _ = await records.read_some(bus, FILES_STREAM, file_subject(tenant, "f", "*"), found[1].sequence)
    assert [record.sequence for record in rest] == [found[2].sequence]
    parts = await records.subjects(bus, FILES_STREAM, file_subject(tenant, "*", 0))
    assert sorted(parts) == [file_subject(tenant, "f", 0), file_subject(tenant, "g", 0)]
    assert await records.subjects(bus, FILES_STREAM, file_subject("nobody", "*", 0)) == []
    assert await records.erase(bus, FILES_STREAM, file_subject(tenant, "f", "*")) == 3
    assert await records.read_some(bus, FILES_STREAM, file_subject(tenant, "f", "*")) == ([], False)


async def test_the_latest_of_more_than_the_server_looks_up_at_once(bus: Bus, tenant: str) -> None:
    names = [f"b{number}" for number in range(1_100)]
    await asyncio.gather(*(records.put(bus, batch_subject(tenant, name), name.encode(), 0) for name in names))
    found = await records.latest(bus, BATCHES_STREAM, batch_subject(tenant, "*"))
    assert sorted(record.payload.decode() for record in found) == sorted(names)
