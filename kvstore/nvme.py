"""The NVMe tier: one file a block, `<root>/blocks/<tenant>/<first 2 hex digits>/<64 hex digits>.kvb`.

Files are written beside and renamed, without fsync: a file torn by a power cut is found by its digest (and fsync would
cost four times the write). The page cache is the memory tier.
"""

import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from kvstore import quarantine
from kvstore.blockfile import BLOCKS, QUARANTINE, key_in, open_unseen, path_of
from kvstore.counters import TierCounters
from kvstore.filetimes import expires_ns, times_of
from kvstore.patience import Patience
from kvstore.retention import ByteCap
from kvstore.staging import Staging
from kvstore.tier import BlobName, Life, check_tenant
from kvstore.tombstones import Reason
from schemas.errors import KvRefused, KvUnavailable

_PROBE_BYTES = 65_536
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NvmeTier:
    """Any number of processes may share a folder. A folder that cannot be written is read only."""

    name = "nvme"

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        max_ttl_s: float = math.inf,
    ) -> None:
        self.counters = TierCounters()
        self.max_ttl_s = max_ttl_s
        self._root = root
        self._clock = clock
        self._staging = Staging(root)
        self._retention = ByteCap(root, max_bytes, self.counters, clock)
        self.tombstones = self._retention.janitor.tombstones
        with suppress(OSError):  # the first write tries again and says what is wrong
            self._staging.open()
        self._retention.start()

    def path(self, name: BlobName) -> str:
        return path_of(self._root, name)

    def present(self, names: Sequence[BlobName]) -> int:
        now_ns = self._now_ns()
        for index, name in enumerate(names):
            try:
                status = os.stat(self.path(name), follow_symlinks=False)
            except FileNotFoundError:
                return index
            except OSError as error:
                raise KvUnavailable(f"cannot look for blocks in {self._root}: {error}") from error
            if expires_ns(status) <= now_ns:
                return index
        return len(names)

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        path = self.path(name)
        with _translated("read a block from", self._root):
            try:
                fd = open_unseen(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return 0  # a link: no blob, so damaged
                raise
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return 0
                if expires_ns(status) <= self._now_ns():
                    self._remove_expired(name, status.st_size)
                    return None
                wanted = min(status.st_size, sum(map(len, into)))
                got = os.readv(fd, into)
            finally:
                os.close(fd)
        return status.st_size if got == wanted else got

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        size = sum(map(len, parts))
        if self.tombstones.remembers(name):
            life = life._replace(reused=True)
        with _translated("write a block to", self._root, KvRefused):
            self._reserve(size)
            written, replaced = 0, 0
            try:
                replaced = self._write_or_evict(name, parts, life)
                written = size
            finally:
                self._retention.settle(size, written, replaced)

    def touch(self, name: BlobName, life: Life) -> bool:
        path = self.path(name)
        try:
            status = os.stat(path, follow_symlinks=False)
            os.utime(path, ns=times_of(life, status), follow_symlinks=False)
        except OSError:
            return False
        return True

    def quarantine(self, name: BlobName) -> None:
        with _translated("quarantine a block in", self._root):
            was_there, freed_bytes = quarantine.move(self._root, self.path(name), name)
            if was_there:
                self.tombstones.record(name, Reason.DAMAGED)
                self.counters.add(quarantined=1)
                self._retention.removed(freed_bytes)

    def erase(self, tenant: str) -> int:
        check_tenant(tenant)
        erased = 0
        with _translated(f"erase the blocks of {tenant} in", self._root):
            for path in _files_under(self._root / BLOCKS / tenant):
                erased += self._remove(path)
                if (key := key_in(os.path.basename(path))) is not None:
                    self.tombstones.record(BlobName(tenant, key), Reason.ERASED)
            for path in _files_under(self._root / QUARANTINE):
                if os.path.basename(path).split(".")[1:2] == [tenant]:
                    erased += self._remove(path)
        return erased

    def probe(self) -> None:
        """Raises `KvUnavailable` if the folder is out of reach, `KvRefused` if only writing to it fails."""
        with _translated("look into", self._root), suppress(FileNotFoundError):
            os.stat(self._root)
        with _translated("write to", self._root, KvRefused):
            path, fd = self._staging.create()
            try:
                _write_all(fd, [memoryview(bytes(_PROBE_BYTES))])
            finally:
                os.close(fd)
                os.unlink(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._retention.close()
        self._staging.close()

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._retention.reserve(num_bytes)
        except FileNotFoundError:  # somebody removed the whole folder
            self._staging.open()
            self._retention.reserve(num_bytes)

    def _write_or_evict(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> int:
        """The size of the blob that was replaced. A disk that is full below the cap is relieved once."""
        try:
            return self._write(name, parts, life)
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._retention.make_room(sum(map(len, parts))):
                raise
            return self._write(name, parts, life)

    def _write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> int:
        path = self.path(name)
        beside, fd = self._staging.create()
        try:
            try:
                _write_all(fd, parts)
                os.utime(fd, ns=times_of(life))
            finally:
                os.close(fd)
            replaced = _size(path)
            try:
                os.rename(beside, path)
            except FileNotFoundError:
                self._make_folders(Path(path).parent)
                os.rename(beside, path)
            return replaced
        except OSError:
            with suppress(OSError):
                os.unlink(beside)
            raise

    def _make_folders(self, folder: Path) -> None:
        for level in (folder.parent.parent, folder.parent, folder):
            with suppress(FileExistsError):
                os.mkdir(level, 0o700)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _remove_expired(self, name: BlobName, size: int) -> None:
        with suppress(OSError):
            os.unlink(self.path(name))
            self._retention.removed(size)
            self.tombstones.record(name, Reason.EXPIRED)
            self.counters.add(expired=1)

    def _remove(self, path: str) -> int:
        """The bytes of a file that is gone now. Another process may remove it as well."""
        try:
            size = os.stat(path, follow_symlinks=False).st_size
            os.unlink(path)
        except FileNotFoundError:
            return 0
        self._retention.removed(size)
        return size


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _files_under(folder: Path) -> Iterator[str]:
    """All of them, or an `OSError`: what cannot be listed must not be taken for erased."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for path, _, names in os.walk(folder, onerror=fail):
        yield from (os.path.join(path, name) for name in names)


@contextmanager
def _translated(what: str, root: Path, kind: type[KvUnavailable] = KvUnavailable) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {what} {root}: {error}") from error


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = list(parts)
    while left:
        written = os.writev(fd, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
