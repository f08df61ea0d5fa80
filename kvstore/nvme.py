"""The NVMe tier: one file a block, `<root>/blocks/<tenant>/<first 2 hex digits>/<64 hex digits>.kvb`.

Files are written beside and renamed, without fsync: a file torn by a power cut is found by its digest (and fsync would
cost four times the write). The page cache is the memory tier.
"""

import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.counters import TierCounters
from kvstore.filetimes import expires_ns, times_of
from kvstore.retention import BLOCKS, QUARANTINE, ByteCap
from kvstore.staging import Staging
from kvstore.tier import BlobName, Life
from schemas.errors import KvUnavailable

MAX_QUARANTINED = 16
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Not following links and not waiting for pipes: whoever can write to the folder must not be able to hang a reader.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NvmeTier:
    """Any number of processes may share a folder. A folder that cannot be written is read only."""

    name = "nvme"

    def __init__(self, root: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.counters = TierCounters()
        self._root = root
        self._clock = clock
        self._staging = Staging(root)
        self._retention = ByteCap(root, max_bytes, self.counters, clock)
        self._numbers = itertools.count()
        with suppress(OSError):  # the first write tries again and says what is wrong
            self._staging.open()
        self._retention.start()

    def path(self, name: BlobName) -> str:
        key = name.key.hex()
        return f"{self._root}/{BLOCKS}/{name.tenant}/{key[:2]}/{key}.kvb"

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

    def read(self, name: BlobName, into: Sequence[memoryview]) -> int | None:
        path = self.path(name)
        with _translated("read a block from", self._root):
            try:
                fd = os.open(path, _READ)
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
                    self._remove_expired(path, status.st_size)
                    return None
                wanted = min(status.st_size, sum(map(len, into)))
                got = os.readv(fd, into)
            finally:
                os.close(fd)
        return status.st_size if got == wanted else got

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        size = sum(map(len, parts))
        if not self._retention.reserve(size):
            raise KvUnavailable(f"{self._root} is at its cap and nothing can be evicted for {size} bytes")
        written = False
        try:
            with _translated("write a block to", self._root):
                self._write_or_evict(name, parts, life)
            written = True
        finally:
            self._retention.settle(size, written)

    def touch(self, name: BlobName, life: Life) -> bool:
        path = self.path(name)
        try:
            status = os.stat(path, follow_symlinks=False)
            os.utime(path, ns=times_of(life, status), follow_symlinks=False)
        except OSError:
            return False
        return True

    def quarantine(self, name: BlobName) -> None:
        """Keeps the newest few for whoever wants to know what happened to them."""
        folder = self._root / QUARANTINE
        with _translated("quarantine a block in", self._root):
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                number = f"{time.time_ns()}-{os.getpid()}-{next(self._numbers)}"
                os.rename(self.path(name), folder / f"{number}-{name.key.hex()}.kvb")
            except FileNotFoundError:
                return
            self.counters.add(quarantined=1)
            for old in sorted(os.listdir(folder))[:-MAX_QUARANTINED]:
                with suppress(FileNotFoundError):  # another process tidies up as well
                    size = os.stat(folder / old).st_size
                    os.unlink(folder / old)
                    self._retention.removed(size)

    def close(self) -> None:
        self._staging.close()

    def _write_or_evict(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        """A disk that is full below the cap is relieved once."""
        try:
            self._write(name, parts, life)
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._retention.make_room(sum(map(len, parts))):
                raise
            self._write(name, parts, life)

    def _write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        path = self.path(name)
        beside, fd = self._staging.create()
        try:
            try:
                _write_all(fd, parts)
                os.utime(fd, ns=times_of(life))
            finally:
                os.close(fd)
            try:
                os.rename(beside, path)
            except FileNotFoundError:
                self._make_folders(Path(path).parent)
                os.rename(beside, path)
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

    def _remove_expired(self, path: str, size: int) -> None:
        with suppress(OSError):
            os.unlink(path)
            self._retention.removed(size)
            self.counters.add(expired=1)


@contextmanager
def _translated(what: str, root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KvUnavailable(f"cannot {what} {root}: {error}") from error


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = list(parts)
    while left:
        written = os.writev(fd, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
