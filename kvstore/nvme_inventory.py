"""What lies in the folder of an NVMe tier. Opening it changes nothing, and needs no right to write."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore import quarantine
from kvstore.blockfile import BLOCKS, key_in, open_unseen, path_of
from kvstore.filetimes import expires_ns, is_reused, times_of
from kvstore.inventory import Entry, Quarantined, Tidied
from kvstore.staging import Staging
from kvstore.tier import BlobName, Life
from kvstore.tombstones import FILE as TOMBSTONES
from kvstore.tombstones import Reason, Tombstones
from kvstore.usage import Usage
from schemas.blob import HEADER_BYTES, BlobHeader, DamagedBlob, parse_header
from schemas.errors import KvUnavailable

PIECE_BYTES = 4 << 20


class NvmeInventory:
    name = "nvme"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tombstones = Tombstones(root)
        self._usage = Usage(root)

    def tenants(self) -> list[str]:
        return sorted(_folders(self.root / BLOCKS))

    def walk(self, tenant: str | None = None) -> Iterator[Entry]:
        for owner in self.tenants() if tenant is None else [tenant]:
            for part in _folders(self.root / BLOCKS / owner):
                for file in _files(self.root / BLOCKS / owner / part):
                    key = key_in(file)
                    entry = None if key is None else self.find(BlobName(owner, key))
                    if entry is not None:
                        yield entry

    def find(self, name: BlobName) -> Entry | None:
        with self._translated("look at"), suppress(FileNotFoundError):
            status = os.stat(self._path(name), follow_symlinks=False)
            life = Life(status.st_atime_ns / 1e9, expires_ns(status) / 1e9, is_reused(status))
            return Entry(name, status.st_size, life, _header(self._path(name), status))
        return None

    def pieces(self, name: BlobName) -> Iterator[bytes]:
        with self._translated("read"), suppress(FileNotFoundError):
            fd = open_unseen(self._path(name))
            try:
                more = True
                while more:  # an empty file is one empty piece
                    more = bool(piece := os.read(fd, PIECE_BYTES))
                    yield piece
            finally:
                os.close(fd)

    def reason_of(self, name: BlobName) -> str | None:
        if not (self.root / TOMBSTONES).exists():
            return None
        found = self._tombstones.reason_of(name)
        return None if found is None else found.reason.name.lower()

    def quarantined(self) -> list[Quarantined]:
        return quarantine.contents(self.root)

    def quarantine(self, name: BlobName) -> None:
        with self._translated("quarantine"):
            was_there, freed_bytes = quarantine.move(self.root, self._path(name), name)
            if was_there:
                self._note_removal(name, Reason.DAMAGED, freed_bytes)

    def remove(self, name: BlobName) -> bool:
        with self._translated("remove"), suppress(FileNotFoundError):
            size = os.stat(self._path(name), follow_symlinks=False).st_size
            os.unlink(self._path(name))
            self._note_removal(name, Reason.ERASED, size)
            return True
        return False

    def set_life(self, name: BlobName, life: Life) -> bool:
        with self._translated("date"), suppress(FileNotFoundError):
            os.utime(self._path(name), ns=times_of(life), follow_symlinks=False)
            return True
        return False

    def tidy(self) -> Tidied:
        with self._translated("tidy up"):
            num_quarantined, num_bytes = quarantine.clear(self.root)
            if num_bytes:
                self._usage.removed(num_bytes)
            with suppress(FileNotFoundError):  # nobody ever wrote here
                return Tidied(num_quarantined, Staging(self.root).clean(), num_bytes)
        return Tidied(num_quarantined, 0, num_bytes)

    def _note_removal(self, name: BlobName, reason: Reason, num_bytes: int) -> None:
        self._tombstones.record(name, reason)
        with suppress(OSError):  # the next count finds out
            self._usage.removed(num_bytes)

    def _path(self, name: BlobName) -> str:
        return path_of(self.root, name)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise KvUnavailable(f"cannot {what} blocks in {self.root}: {error}") from error


def _header(path: str, status: os.stat_result) -> BlobHeader | None:
    """None also for a link, a pipe or a file that we may not read: no blob either."""
    if not stat.S_ISREG(status.st_mode):
        return None
    with suppress(DamagedBlob, PermissionError):
        fd = open_unseen(path)
        try:
            return parse_header(os.read(fd, HEADER_BYTES))
        finally:
            os.close(fd)
    return None


def _folders(root: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _files(folder: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry.name for entry in entries]
    return []
