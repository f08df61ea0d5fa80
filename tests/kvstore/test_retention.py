import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.counters import TierCounters
from kvstore.eviction import LEASE_S
from kvstore.janitor import Janitor
from kvstore.nvme import NvmeTier
from kvstore.stock import Stock, StockTaker
from kvstore.tier import BlobName, Life
from kvstore.usage import Usage
from schemas.errors import KvUnavailable
from tests.kvstore.tier_contract import Clock, parts, read

BLOCK_BYTES = 1000
CAP_BYTES = 10 * BLOCK_BYTES


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(tmp_path: Path, clock: Clock) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path, CAP_BYTES, clock)
    yield tier
    tier.close()


def name(number: int) -> BlobName:
    return BlobName("default", number.to_bytes(32, "big"))


def write(tier: NvmeTier, clock: Clock, number: int, ttl_s: float = 10**6) -> None:
    clock.now += 1
    tier.write(name(number), parts(b"x" * BLOCK_BYTES), clock.life(ttl_s))


def bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.kvb"))


def held(tier: NvmeTier, numbers: range) -> list[int]:
    return [number for number in numbers if os.path.exists(tier.path(name(number)))]


def test_the_cap_holds_after_every_write(tier: NvmeTier, clock: Clock, tmp_path: Path) -> None:
    for number in range(50):
        write(tier, clock, number)
        assert bytes_in(tmp_path) <= CAP_BYTES
    assert held(tier, range(50)) == list(range(40, 50))
    assert tier.counters.evicted == 40
    assert tier.counters.evicted_bytes == 40 * BLOCK_BYTES


def test_what_is_there_at_start_counts(tier: NvmeTier, clock: Clock, tmp_path: Path) -> None:
    for number in range(8):
        write(tier, clock, number)
    tier.close()
    again = NvmeTier(tmp_path, CAP_BYTES, clock)
    for number in range(8, 20):
        write(again, clock, number)
        assert bytes_in(tmp_path) <= CAP_BYTES
    assert held(again, range(20)) == list(range(10, 20))
    again.close()


def test_a_lower_cap_is_reached_by_the_next_write(tier: NvmeTier, clock: Clock, tmp_path: Path) -> None:
    for number in range(10):
        write(tier, clock, number)
    smaller = NvmeTier(tmp_path, 3 * BLOCK_BYTES, clock)
    write(smaller, clock, 10)
    assert held(smaller, range(11)) == [8, 9, 10]
    smaller.close()


def test_used_blocks_outlive_unused_ones(tier: NvmeTier, clock: Clock) -> None:
    for number in range(10):
        write(tier, clock, number)
    clock.now += 1
    assert tier.touch(name(0), clock.life())
    for number in range(10, 19):
        write(tier, clock, number)
    assert held(tier, range(19)) == [0, *range(10, 19)]


def test_a_block_used_after_the_count_is_passed_over(tier: NvmeTier, clock: Clock) -> None:
    for number in range(11):  # the last one makes the tier choose its victims: 0 now, 1 next
        write(tier, clock, number)
    assert tier.touch(name(1), clock.life())
    write(tier, clock, 11)
    assert held(tier, range(12)) == [1, *range(3, 12)]


def test_blocks_of_jobs_in_flight_are_no_victims_while_there_are_others(tier: NvmeTier, clock: Clock) -> None:
    """CASES 24: not even for reused ones; a job in flight renews its lease."""
    for number in range(10):
        write(tier, clock, number)
    clock.now += LEASE_S
    for number in (2, 3):
        tier.touch(name(number), clock.life())
    for number in range(4, 10):
        tier.touch(name(number), clock.life()._replace(used_at=clock.now - LEASE_S, reused=True))
    for number in range(10, 18):
        write(tier, clock, number)
    assert held(tier, range(18)) == [2, 3, *range(10, 18)]


def test_probing_for_blocks_saves_none_of_them(tier: NvmeTier, clock: Clock) -> None:
    """Only a use counts: constant probes must not starve eviction."""
    for number in range(30):
        write(tier, clock, number)
        tier.present([name(i) for i in range(30)])
    assert held(tier, range(30)) == list(range(20, 30))


def test_quarantined_blocks_go_first_and_count_until_then(tier: NvmeTier, clock: Clock, tmp_path: Path) -> None:
    for number in range(10):
        write(tier, clock, number)
    tier.quarantine(name(9))
    assert bytes_in(tmp_path) == CAP_BYTES
    write(tier, clock, 10)
    assert held(tier, range(11)) == [*range(9), 10]
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_a_block_larger_than_the_cap_is_refused_and_nothing_evicted(tier: NvmeTier, clock: Clock) -> None:
    write(tier, clock, 0)
    with pytest.raises(KvUnavailable, match="cap"):
        tier.write(name(1), parts(b"x" * (CAP_BYTES + 1)), clock.life())
    assert held(tier, range(2)) == [0]


def test_writes_that_fail_take_no_room(tier: NvmeTier, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tier, clock, 0)

    def refuse(fd: int, buffers: object) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", refuse)
        for number in range(1, 21):
            with pytest.raises(KvUnavailable, match="broken"):
                write(tier, clock, number)
    write(tier, clock, 21)
    assert held(tier, range(22)) == [0, 21]


def test_what_is_written_during_a_count_is_counted(
    tier: NvmeTier, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count finds it or not: it must not be missing afterwards."""
    write(tier, clock, 0)
    usage = Usage(tmp_path)
    real = StockTaker.take

    def take_while_one_is_written(taker: StockTaker, now_ns: int) -> Stock | None:
        stock = real(taker, now_ns)
        usage.reserve(BLOCK_BYTES)  # still under way when the count ends
        write(tier, clock, 1)
        return stock

    monkeypatch.setattr(StockTaker, "take", take_while_one_is_written)
    assert Janitor(tmp_path, CAP_BYTES, TierCounters(), lambda victims: None, clock).sweep()
    assert usage.read().total_bytes == 3 * BLOCK_BYTES
    usage.close()


def test_expired_blocks_are_removed_by_the_count(tier: NvmeTier, clock: Clock, tmp_path: Path) -> None:
    for number in range(10):
        write(tier, clock, number, ttl_s=100 if number % 2 else 10**6)
    clock.now += 200
    write(tier, clock, 10)
    assert held(tier, range(11)) == [0, 2, 4, 6, 8, 10]
    assert tier.counters.expired == 5
    assert tier.counters.evicted == 0


def test_what_others_removed_makes_room(tier: NvmeTier, clock: Clock) -> None:
    for number in range(10):
        write(tier, clock, number)
    for number in range(5):
        os.unlink(tier.path(name(number)))
    write(tier, clock, 10)
    assert held(tier, range(5, 11)) == list(range(5, 11))
    assert tier.counters.evicted == 0


def test_several_tiers_share_a_cap(tmp_path: Path, clock: Clock) -> None:
    tiers = [NvmeTier(tmp_path, CAP_BYTES, clock) for _ in range(3)]
    for number in range(60):
        write(tiers[number % 3], clock, number)
        assert bytes_in(tmp_path) <= CAP_BYTES
    assert held(tiers[0], range(60)) == list(range(50, 60))
    for tier in tiers:
        tier.close()


def test_a_read_does_not_disturb_the_order(tier: NvmeTier, clock: Clock) -> None:
    """Mount options may set access times on reading; a read is no use, and a touch puts the intended time back."""
    write(tier, clock, 0)
    life = Life(clock.now - 30.0, 10**10)
    assert tier.touch(name(0), life)
    assert read(tier, name(0)) is not None
    assert os.stat(tier.path(name(0))).st_atime == life.used_at
