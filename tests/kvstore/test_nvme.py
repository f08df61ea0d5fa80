import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.codec import PLAIN
from kvstore.eviction import LEASE_S
from kvstore.filetimes import expires_ns, is_reused
from kvstore.nvme import NvmeTier
from kvstore.quarantine import MAX_QUARANTINED
from kvstore.store import KVStore
from kvstore.tier import BlobName
from kvstore.tombstones import Reason
from kvstore.usage import Usage
from schemas.errors import KvUnavailable
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, empty, payload_of
from tests.kvstore.tier_contract import Clock, parts, read

NAME = BlobName("default", bytes(range(32)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(root, 10**9)
    yield tier
    tier.close()


def store_of(tier: NvmeTier) -> KVStore:
    return KVStore([tier], IDENTITY, GEOMETRY, PLAIN)


def blocks_in(root: Path) -> list[Path]:
    return sorted(root.glob("blocks/*/??/*.kvb"))


def temporary_in(root: Path) -> list[Path]:
    return sorted(root.glob("tmp/*.part"))


def test_one_file_a_block_named_by_its_key(root: Path, tier: NvmeTier) -> None:
    tier.write(NAME, parts(b"x" * 200), Clock().life())
    assert blocks_in(root) == [root / "blocks" / "default" / "00" / f"{NAME.key.hex()}.kvb"]
    assert temporary_in(root) == []


def test_only_the_owner_can_read_what_people_asked(root: Path, tier: NvmeTier) -> None:
    tier.write(NAME, parts(b"x" * 200), Clock().life())
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert stat.S_IMODE(blocks_in(root)[0].stat().st_mode) == 0o600


def test_the_times_of_a_file_are_its_life(root: Path, tier: NvmeTier) -> None:
    life = Clock().life()
    tier.write(NAME, parts(b"x" * 200), life)
    status = blocks_in(root)[0].stat()
    assert (status.st_atime, status.st_mtime + 86_400, is_reused(status)) == life
    assert tier.touch(NAME, life._replace(reused=True))
    status = blocks_in(root)[0].stat()
    assert (status.st_atime, expires_ns(status), is_reused(status)) == (
        life.used_at,
        int(life.expires_at) * 10**9 + 1000,
        True,
    )
    assert tier.touch(NAME, life)
    assert is_reused(blocks_in(root)[0].stat()), "once said it stays so"


def test_a_file_edited_in_place_does_not_expire_unseen(root: Path, tier: NvmeTier) -> None:
    store, ref = store_of(tier), chain(1)[0]
    assert store.save(ref, payload_of(ref), TTL_S)
    for edit in (lambda blob: blob[:-1], lambda blob: b"", lambda blob: bytes(len(blob))):
        path = Path(tier.path(ref.name))
        path.write_bytes(edit(path.read_bytes()))
        assert store.lookup([ref]) == 1
        assert not store.load(ref, empty(ref))
        assert store.save(ref, payload_of(ref), TTL_S)
    assert store.counters.damaged == 3
    assert tier.counters.expired == 0


def test_an_expired_file_is_removed_by_its_reader(root: Path) -> None:
    clock = Clock()
    tier = NvmeTier(root, 10**9, clock)
    tier.write(NAME, parts(b"x" * 200), clock.life(10))
    clock.now += 10
    assert read(tier, NAME) is None
    assert tier.counters.expired == 1
    assert blocks_in(root) == []
    tier.close()


def test_quarantine_is_bounded_and_keeps_the_newest(root: Path, tier: NvmeTier) -> None:
    for i in range(MAX_QUARANTINED + 5):
        tier.write(BlobName("default", bytes([i]) * 32), parts(bytes([i]) * 200), Clock().life())
        tier.quarantine(BlobName("default", bytes([i]) * 32))
    kept = sorted((root / "quarantine").iterdir())
    assert [path.read_bytes()[0] for path in kept] == list(range(5, MAX_QUARANTINED + 5))
    assert blocks_in(root) == []


def test_a_tombstone_says_why_a_block_is_gone(root: Path) -> None:
    clock = Clock()
    tier = NvmeTier(root, 10**6, clock)
    names = [BlobName("default", bytes([i]) * 32) for i in range(5)]
    for number, name in enumerate(names):
        tier.write(name, parts(b"x" * 200_000), clock.life(10**6 if number else 10))
        clock.now += LEASE_S
    assert read(tier, names[0]) is None
    tier.quarantine(names[1])
    for number in (5, 6):  # room for one is in quarantine
        tier.write(BlobName("other", bytes([number]) * 32), parts(b"x" * 200_000), clock.life())
    tier.erase("default")
    stones = [tier.tombstones.reason_of(name) for name in names]
    expected = [Reason.EXPIRED, Reason.DAMAGED, Reason.ERASED, Reason.ERASED, Reason.ERASED]
    assert [stone and stone.reason for stone in stones] == expected
    for number in (7, 8, 9, 10):
        tier.write(BlobName("other", bytes([number]) * 32), parts(b"x" * 200_000), clock.life())
        clock.now += LEASE_S
    evicted = tier.tombstones.reason_of(BlobName("other", bytes([5]) * 32))
    assert evicted is not None and evicted.reason is Reason.EVICTED
    tier.close()


def test_erasing_a_tenant_takes_what_is_in_quarantine(root: Path, tier: NvmeTier) -> None:
    for tenant in ("acme", "acme-2"):
        for number in range(2):
            name = BlobName(tenant, bytes([number]) * 32)
            tier.write(name, parts(b"x" * 200), Clock().life())
            if number:
                tier.quarantine(name)
    assert tier.erase("acme") == 400
    left = sorted(path.name.split(".")[1] for path in (root / "quarantine").iterdir())
    assert (left, len(blocks_in(root))) == (["acme-2"], 1)
    usage = Usage(root)
    assert usage.read().total_bytes == 400
    usage.close()


def test_what_cannot_be_listed_or_removed_is_not_erased(
    root: Path, tier: NvmeTier, read_only: Callable[[Path, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write(NAME, parts(b"x" * 200), Clock().life())
    read_only(root, True)
    with pytest.raises(KvUnavailable, match="erase the blocks of default"):
        tier.erase("default")
    read_only(root, False)
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("/00"):
            raise PermissionError(errno.EACCES, "not yours", path)
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(KvUnavailable, match="not yours"):
            tier.erase("default")
    assert tier.erase("default") == 200


def test_a_block_that_comes_back_counts_as_reused(root: Path, tier: NvmeTier) -> None:
    tier.write(NAME, parts(b"x" * 200), Clock().life())
    assert not is_reused(blocks_in(root)[0].stat())
    tier.erase("default")
    tier.write(NAME, parts(b"x" * 200), Clock().life())
    assert is_reused(blocks_in(root)[0].stat())


def test_depth_orders_a_chain_for_eviction(root: Path, tier: NvmeTier) -> None:
    """The shared first block must outlive the last, after saving and renewing alike; a load is no use."""
    store, refs = store_of(tier), chain(4)

    def order() -> list[float]:
        return [os.stat(tier.path(ref.name)).st_atime for ref in refs]

    for ref in refs:
        assert store.save(ref, payload_of(ref), TTL_S, used_at=1000.0)
    assert order() == sorted(order(), reverse=True) and max(order()) == 1000.0
    before = order()
    for ref in refs:
        assert store.load(ref, empty(ref))
    assert order() == before
    store.renew(refs, TTL_S)
    assert order() == sorted(order(), reverse=True) and min(order()) > 1000.0


def test_a_folder_that_cannot_be_is_a_counted_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tier = NvmeTier(tmp_path / "file" / "kv", 10**9)
    store, (ref,) = store_of(tier), chain(1)
    assert store.lookup([ref]) == 0
    assert not store.load(ref, empty(ref))
    assert not store.save(ref, payload_of(ref), TTL_S)
    assert store.renew([ref], TTL_S) == 0
    assert store.counters.write_errors == 1
    tier.close()


def test_a_read_only_folder_serves_what_it_holds(root: Path, read_only: Callable[[Path, bool], None]) -> None:
    first, second, third = chain(3)
    writer = NvmeTier(root, 10**9)
    for ref in (first, second):
        store_of(writer).save(ref, payload_of(ref), TTL_S)
    writer.close()
    Path(writer.path(second.name)).write_bytes(bytes(1000))
    read_only(root, True)
    tier = NvmeTier(root, 10**9)
    store = store_of(tier)
    into = empty(first)
    assert store.load(first, into) and into == payload_of(first)
    assert not store.load(second, empty(second))
    assert not store.save(third, payload_of(third), TTL_S)
    assert store.save(first, payload_of(first), TTL_S)  # it is there
    assert (store.counters.damaged, store.counters.write_errors) == (1, 1)
    read_only(root, False)
    assert store.save(third, payload_of(third), TTL_S)
    assert store.save(second, payload_of(second), TTL_S)
    tier.close()


def test_a_folder_removed_under_the_tier_comes_back(root: Path, tier: NvmeTier) -> None:
    store, (first, second) = store_of(tier), chain(2)
    assert store.save(first, payload_of(first), TTL_S)
    shutil.rmtree(root)
    assert not store.load(first, empty(first))
    assert store.save(second, payload_of(second), TTL_S)
    assert store.load(second, empty(second))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_failed_write_is_false_leaves_nothing_and_is_logged_once(
    code: int, root: Path, tier: NvmeTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, buffers: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", refuse)
    store = store_of(tier)
    for ref in chain(5):
        assert not store.save(ref, payload_of(ref), TTL_S)
    assert store.counters.write_errors == 5
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert blocks_in(root) == temporary_in(root) == []


def test_a_full_disk_is_relieved_once(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC below the cap: the oldest block goes, and the write is tried again."""
    old, new = chain(2)
    store = store_of(tier)
    assert store.save(old, payload_of(old), TTL_S)
    real, refusals = os.writev, [OSError(errno.ENOSPC, "full")]

    def refuse_once(fd: int, buffers: list[memoryview]) -> int:
        if refusals:
            raise refusals.pop()
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", refuse_once)
    assert store.save(new, payload_of(new), TTL_S)
    assert store.load(new, empty(new))
    assert not store.load(old, empty(old))
    assert tier.counters.evicted == 1


def test_short_writes_are_completed(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(fd: int, buffers: list[memoryview]) -> int:
        return real(fd, [b"".join(buffers)[:97]])

    monkeypatch.setattr(os, "writev", short)
    blob = bytes(range(256)) * 3
    tier.write(NAME, parts(blob[:96], blob[96:98], b"", blob[98:]), Clock().life())
    assert read(tier, NAME) == blob


def test_a_small_disk_fills_up_and_goes_on(small_disk: Path) -> None:
    """10 MB of disk under a cap that promises more: every save and load still has an answer."""
    tier = NvmeTier(small_disk / "kv", 10**9)
    store = store_of(tier)
    refs = chain(2000)
    for ref in refs:
        store.save(ref, payload_of(ref), TTL_S)
        assert store.load(ref, empty(ref))
    assert tier.counters.evicted > 0
    assert store.counters.write_errors == 0
    assert temporary_in(small_disk / "kv") == []
    tier.close()
