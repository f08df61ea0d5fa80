"""Files have a cap and an end, and nothing stays of those that were given up."""

from collections.abc import AsyncIterator

import pytest

from schemas.errors import JobNotFound, StorageFull
from schemas.subjects import FILES_STREAM, file_subject
from services.batch import sweeping
from services.batch.shelf import Shelf
from services.batch.sweeping import Sweeper
from services.bus import records
from services.bus.connection import Bus
from tests.batch.conftest import FILES_BYTES


async def parts(data: bytes, num_parts: int = 4) -> AsyncIterator[bytes]:
    for _ in range(num_parts):
        yield data


async def left(bus: Bus, tenant: str) -> int:
    return len(await records.subjects(bus, FILES_STREAM, file_subject(tenant, "*", "*")))


async def read(shelf: Shelf, name: str) -> bytes:
    return b"".join([part async for part in shelf.content(name)])


async def test_the_cap(bus: Bus, shelf: Shelf, tenant: str) -> None:
    kept = await shelf.put_file(parts(b"x" * 300_000), "a", "batch")
    with pytest.raises(StorageFull, match=r"bus\.files_max_bytes"):
        await shelf.put_file(parts(b"y" * (FILES_BYTES // 4)), "b", "batch")
    assert [file.id for file in await shelf.files()] == [kept.id], "what was refused has left nothing"
    assert await left(bus, tenant) == len(await records.subjects(bus, FILES_STREAM, file_subject(tenant, kept.id, "*")))
    await shelf.remove_file(kept.id)
    large = await shelf.put_file(parts(b"y" * 600_000), "b", "batch")
    assert await read(shelf, large.id) == b"y" * 2_400_000
    await shelf.remove_file(large.id)


async def test_a_file_whose_time_is_over(bus: Bus, shelf: Shelf, tenant: str) -> None:
    lasting = await shelf.put_file(parts(b"a"), "lasting", "batch")
    gone = await shelf.name_file(await shelf.upload(parts(b"b")), "gone", "batch", life_s=0)
    assert [file.id for file in await shelf.files()] == [lasting.id]
    with pytest.raises(JobNotFound):
        await shelf.file(gone.id)
    assert await left(bus, tenant) == 4
    await Sweeper(bus, "*").sweep()
    assert await left(bus, tenant) == 2 and await read(shelf, lasting.id) == b"aaaa"


async def test_an_upload_that_was_given_up(
    bus: Bus, shelf: Shelf, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway died, so nobody erased it; one that still goes on is left alone."""
    monkeypatch.setattr(sweeping, "ABANDONED_S", 0.0)
    dead, alive = await shelf.upload(parts(b"a")), await shelf.upload(parts(b"b"))
    sweeper = Sweeper(bus, tenant)
    monkeypatch.setattr(sweeping, "ABANDONED_S", 1e9)
    await sweeper.sweep()
    assert await left(bus, tenant) == 2
    await records.put(bus, file_subject(tenant, alive.name, 1), b"more", 0)
    monkeypatch.setattr(sweeping, "ABANDONED_S", 0.0)
    named = await shelf.name_file(alive._replace(size=8), "b", "batch")
    await sweeper.sweep()
    assert [file.id for file in await shelf.files()] == [named.id] and await left(bus, tenant) == 3
    assert not await records.subjects(bus, FILES_STREAM, file_subject(tenant, dead.name, "*"))


async def test_a_file_that_goes_while_it_is_read(bus: Bus, shelf: Shelf, tenant: str) -> None:
    """What lost a part on the way is no file."""
    made = await shelf.put_file(parts(b"x" * 400_000), "a", "batch")
    await records.erase(bus, FILES_STREAM, file_subject(tenant, made.id, 0))
    with pytest.raises(JobNotFound, match="while it was read"):
        await read(shelf, made.id)
    await shelf.remove_file(made.id)
