"""Retention over several processes: one cap, one counter, one janitor at a time."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import filelock, retention
from kvstore.counters import TierCounters
from kvstore.janitor import Janitor
from kvstore.nvme import NvmeTier
from kvstore.retention import ByteCap
from kvstore.staging import Staging
from kvstore.stock import Stock, StockTaker, Victim
from kvstore.tier import BlobName
from kvstore.tombstones import Reason
from kvstore.usage import FILE, Usage
from schemas.errors import KvUnavailable
from tests.kvstore.tier_contract import Clock, life_now, parts, read

BLOCK_BYTES = 4000
CAP_BYTES = 50 * BLOCK_BYTES


def name(number: int, tenant: str = "default") -> BlobName:
    return BlobName(tenant, number.to_bytes(32, "big"))


def janitor_of(root: Path, clock: Clock | None = None) -> Janitor:
    return Janitor(root, CAP_BYTES, TierCounters(), lambda victims: None, clock or Clock())


def bytes_in(root: Path) -> int:
    """Of blocks and of those that are being written; what vanishes meanwhile is not counted."""
    total = 0
    for folder in (root / "blocks", root / "tmp"):
        for path in folder.rglob("*.kvb"), folder.rglob("*.part"):
            for file in path:
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    continue
    return total


@contextmanager
def process(mode: str, folder: Path, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.kvstore.sharer", mode, str(folder), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as running:
        try:
            yield running
        finally:
            running.kill()


def line_of(running: "subprocess.Popen[str]") -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def test_processes_share_one_cap(tmp_path: Path) -> None:
    """CASES 24: usage is never above the cap, and one block for each writing process."""
    num_writers, num_blocks = 3, 300
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        for number in range(30):  # some are there at start
            tier.write(name(10**6 + number), parts(bytes(BLOCK_BYTES)), life_now())
    writers = [process("write", tmp_path, CAP_BYTES, BLOCK_BYTES, 1000 * i, num_blocks) for i in range(num_writers)]
    most = 0
    with writers[0] as one, writers[1] as two, writers[2] as three:
        while any(writer.poll() is None for writer in (one, two, three)):
            most = max(most, bytes_in(tmp_path))
        results = [line_of(writer).split() for writer in (one, two, three)]
    assert CAP_BYTES // 2 < most <= CAP_BYTES + num_writers * BLOCK_BYTES
    assert [int(written) for written, _ in results] == [num_blocks] * num_writers
    num_left = len(list(tmp_path.glob("blocks/*/*/*.kvb")))
    assert sum(int(evicted) for _, evicted in results) == 30 + num_writers * num_blocks - num_left
    usage = Usage(tmp_path)
    assert usage.read().total_bytes == bytes_in(tmp_path) <= CAP_BYTES
    usage.close()


def test_when_the_janitor_dies_another_takes_over(tmp_path: Path) -> None:
    janitor = janitor_of(tmp_path)
    with process("janitor", tmp_path) as other:
        assert line_of(other) == "janitor"
        assert not janitor.sweep(), "one at a time"
        other.kill()
        other.wait()
    assert janitor.sweep()
    janitor.close()


def test_what_another_process_has_done_since_need_not_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = janitor_of(tmp_path), janitor_of(tmp_path)
    seen_ns = one.usage.read().counted_ns
    assert other.sweep()

    def fail(taker: StockTaker, now_ns: int) -> Stock | None:
        raise AssertionError("counted twice")

    monkeypatch.setattr(StockTaker, "take", fail)
    assert one.sweep(since_ns=seen_ns)
    one.close()
    other.close()


def test_a_writer_that_dies_takes_no_room_for_long(tmp_path: Path) -> None:
    """Its reservation goes with the second sweep, its file with the first, what it stored stays."""
    with process("die", tmp_path, CAP_BYTES, BLOCK_BYTES) as writer:
        assert line_of(writer) == "half"
        writer.kill()
        writer.wait()
    assert len(list(tmp_path.glob("tmp/*.part"))) == 1
    janitor = janitor_of(tmp_path)
    assert janitor.usage.read().total_bytes == 2 * BLOCK_BYTES
    assert janitor.sweep() and janitor.sweep()
    assert janitor.usage.read().total_bytes == BLOCK_BYTES
    assert list(tmp_path.glob("tmp/*")) == []
    janitor.close()


def test_a_counter_that_was_kept_need_not_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write does not wait for a count of what may be a million files."""
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        tier.write(name(1), parts(bytes(BLOCK_BYTES)), life_now())
    counting = threading.Event()
    monkeypatch.setattr(StockTaker, "take", lambda taker, now_ns: counting.wait(60) and None)
    monkeypatch.setattr(retention, "_FIRST_COUNT_S", 0.1)
    usage = Usage(tmp_path)
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        tier.write(name(2), parts(bytes(BLOCK_BYTES)), life_now())
        assert usage.read().total_bytes == 2 * BLOCK_BYTES
        # Where nothing is known a write gives up soon, rather than to wait or to exceed the cap.
        (tmp_path / FILE).unlink()
        with pytest.raises(KvUnavailable, match="still being counted"):
            tier.write(name(3), parts(bytes(BLOCK_BYTES)), life_now())
        counting.set()
    usage.close()


def test_a_process_frozen_while_it_counts_costs_the_others_their_writes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filelock.lock, "__defaults__", (0.05,))
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        tier.write(name(1), parts(bytes(BLOCK_BYTES)), life_now())
        with open(tmp_path / FILE, "rb") as frozen:
            assert filelock.try_lock(frozen.fileno())
            with pytest.raises(KvUnavailable, match="another process holds the lock"):
                tier.write(name(2), parts(bytes(BLOCK_BYTES)), life_now())
            assert tier.present([name(1)]) == 1 and read(tier, name(1)) == bytes(BLOCK_BYTES)
        tier.write(name(2), parts(bytes(BLOCK_BYTES)), life_now())


@pytest.mark.parametrize("junk", [b"", b"KVRU", b"\xff" * 100])
def test_a_counter_that_is_none_is_made_anew(tmp_path: Path, junk: bytes) -> None:
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        tier.write(name(1), parts(bytes(BLOCK_BYTES)), life_now())
    (tmp_path / FILE).write_bytes(junk)
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        tier.write(name(2), parts(bytes(BLOCK_BYTES)), life_now())
    usage = Usage(tmp_path)
    assert usage.read().total_bytes == 2 * BLOCK_BYTES
    usage.close()


def test_a_replaced_block_counts_once(tmp_path: Path) -> None:
    with NvmeTier(tmp_path, CAP_BYTES) as tier:
        for size in (BLOCK_BYTES, BLOCK_BYTES // 2, BLOCK_BYTES):
            tier.write(name(1), parts(bytes(size)), life_now())
        usage = Usage(tmp_path)
        assert usage.read().total_bytes == BLOCK_BYTES
        usage.close()


def test_the_background_sweep_removes_what_expired_and_what_the_dead_left(tmp_path: Path) -> None:
    clock = Clock()
    with NvmeTier(tmp_path, CAP_BYTES, clock) as tier:
        for number in range(4):
            tier.write(name(number), parts(bytes(BLOCK_BYTES)), clock.life(10 if number % 2 else 1000))
    dead = Staging(tmp_path)
    os.close(dead.create()[1])
    dead.close()
    clock.now += 11
    Usage(tmp_path).correct(Usage(tmp_path).read(), 0, 1, 0)  # the last count was long ago
    with NvmeTier(tmp_path, CAP_BYTES, clock) as tier:
        deadline_s = time.monotonic() + 30
        while len(list(tmp_path.glob("blocks/*/*/*.kvb"))) > 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    janitor = janitor_of(tmp_path, clock)
    assert janitor.usage.read().total_bytes == 2 * BLOCK_BYTES
    reasons = [janitor.tombstones.reason_of(name(number)) for number in range(4)]
    assert [stone and stone.reason for stone in reasons] == [None, Reason.EXPIRED, None, Reason.EXPIRED]
    assert list(tmp_path.glob("tmp/*.part")) == []
    janitor.close()


def test_a_lower_cap_is_reached_though_nobody_writes(tmp_path: Path) -> None:
    clock = Clock()
    with NvmeTier(tmp_path, CAP_BYTES, clock) as tier:
        for number in range(40):
            tier.write(name(number), parts(bytes(BLOCK_BYTES)), clock.life())
            clock.now += 1
    with NvmeTier(tmp_path, 10 * BLOCK_BYTES, clock) as tier:
        deadline_s = time.monotonic() + 30
        while tier.present([name(29)]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert tier.present([name(number) for number in range(30, 40)]) == 10
    assert bytes_in(tmp_path) == 10 * BLOCK_BYTES


def test_a_write_that_would_have_to_evict_for_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has made some room, and the next one goes on with that."""
    clock = Clock()
    with NvmeTier(tmp_path, CAP_BYTES, clock) as tier:
        for number in range(40):
            tier.write(name(number), parts(bytes(BLOCK_BYTES)), clock.life())
    monkeypatch.setattr(retention, "EVICT_S", 0.05)
    monkeypatch.setattr(ByteCap, "_relieve", lambda cap: None)
    real = ByteCap._evict

    def slowly(cap: ByteCap, victim: Victim) -> int:
        time.sleep(0.01)
        return real(cap, victim)

    monkeypatch.setattr(ByteCap, "_evict", slowly)
    with NvmeTier(tmp_path, 10 * BLOCK_BYTES, clock) as tier:
        with pytest.raises(KvUnavailable, match="nothing can be evicted"):
            tier.write(name(99), parts(bytes(BLOCK_BYTES)), clock.life())
        assert 0 < tier.counters.evicted < 30
        for _ in range(100):
            try:
                tier.write(name(99), parts(bytes(BLOCK_BYTES)), clock.life())
                break
            except KvUnavailable:
                continue
        assert tier.present([name(99)]) and bytes_in(tmp_path) <= 10 * BLOCK_BYTES


def test_a_list_of_victims_may_name_nothing_outside_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "x" / "blocks" / "00" / f"{bytes(32).hex()}.kvb"
    outside.parent.mkdir(parents=True)
    outside.write_bytes(b"not ours")
    root = tmp_path / "x" / "kv"
    with NvmeTier(root, 2 * BLOCK_BYTES) as tier:
        tier.write(name(1), parts(bytes(BLOCK_BYTES)), life_now())
        path = Victim(BlobName("../../blocks", bytes(32)), outside.stat().st_atime_ns)
        tier._retention._publish([path])
        for number in range(2, 6):
            tier.write(name(number), parts(bytes(BLOCK_BYTES)), life_now())
    assert outside.exists()
