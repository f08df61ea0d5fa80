import multiprocessing
from pathlib import Path

import pytest

from kvstore.tier import BlobName
from kvstore.tombstones import FILE, Reason, Tombstone, Tombstones
from tests.kvstore.tier_contract import Clock


def name(number: int) -> BlobName:
    return BlobName("default", number.to_bytes(8, "little") + bytes(24))


def test_a_reason_is_told_to_every_process(tmp_path: Path) -> None:
    clock = Clock()
    writer, reader = Tombstones(tmp_path, clock=clock), Tombstones(tmp_path)
    assert reader.reason_of(name(1)) is None
    for number, reason in enumerate(Reason):
        writer.record(name(number), reason)
        assert reader.reason_of(name(number)) == Tombstone(reason, clock.now)
    assert [reader.remembers(name(number)) for number in range(5)] == [True, True, True, True, False]


def test_the_newest_reason_counts(tmp_path: Path) -> None:
    stones = Tombstones(tmp_path, 4)
    for reason in (Reason.EVICTED, Reason.ERASED, Reason.EXPIRED, Reason.DAMAGED, Reason.ERASED, Reason.EVICTED):
        stones.record(name(7), reason)
        found = stones.reason_of(name(7))
        assert found is not None and found.reason is reason


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    stones, late = Tombstones(tmp_path, 10), Tombstones(tmp_path, 999)
    for number in range(25):
        stones.record(name(number), Reason.EVICTED)
    for ring in (stones, late):
        assert [n for n in range(25) if ring.remembers(name(n))] == list(range(15, 25))
        assert [n for n in range(25) if ring.reason_of(name(n))] == list(range(15, 25))
    assert (tmp_path / FILE).stat().st_size == 64 + 10 * 48


def test_keys_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    stones = Tombstones(tmp_path)
    stones.record(BlobName("default", bytes(8) + b"x" * 24), Reason.EXPIRED)
    assert stones.reason_of(BlobName("default", bytes(8) + b"y" * 24)) is None


@pytest.mark.parametrize(
    "junk", [b"", b"x", b"KVRT" + bytes(60), b"\xff" * 5000], ids=["empty", "short", "zero", "junk"]
)
def test_a_file_that_is_no_ring_is_made_anew(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / FILE).write_bytes(junk)
    stones = Tombstones(tmp_path)
    assert stones.reason_of(name(1)) is None
    stones.record(name(1), Reason.ERASED)
    found = stones.reason_of(name(1))
    assert found is not None and found.reason is Reason.ERASED


def test_a_file_that_was_removed_or_cannot_be_made_harms_nobody(tmp_path: Path) -> None:
    stones = Tombstones(tmp_path / "nowhere")
    stones.record(name(1), Reason.EVICTED)
    assert stones.reason_of(name(1)) is None
    (tmp_path / "nowhere").mkdir()
    stones.record(name(1), Reason.EVICTED)
    (tmp_path / "nowhere" / FILE).unlink()
    assert not stones.remembers(name(1))
    stones.record(name(2), Reason.EVICTED)
    assert stones.remembers(name(2)) and not stones.remembers(name(1))


def bury(root: Path, first: int) -> None:
    stones = Tombstones(root)
    for number in range(first, first + 500):
        stones.record(name(number), Reason.EVICTED)


def test_processes_do_not_overwrite_each_others_records(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=bury, args=(tmp_path, 1000 * number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stones = Tombstones(tmp_path)
    assert all(stones.remembers(name(1000 * writer + number)) for writer in range(3) for number in range(500))
