"""The blocks that go next, chosen by one process for all that use a folder: a file of records, the next to go first."""

import os
import struct
from contextlib import suppress
from pathlib import Path

from kvstore.blockfile import READ
from kvstore.filelock import is_same_file
from kvstore.stock import Victim
from kvstore.tier import BlobName, check_tenant
from schemas.errors import InvalidRequest

FILE = "victims"
_RECORD = struct.Struct("<32s64sq")


class Victims:
    """Not thread-safe. Each process goes through the list by itself: a victim that is gone is passed over."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._fd = -1  # of the list in hand: held open, its inode number tells it from every later one
        self._records = b""
        self._next = 0

    def publish(self, victims: list[Victim]) -> None:
        """Replaces the list; one process at a time. On a full disk it is known to this process only."""
        self.close()
        self._records = b"".join(_RECORD.pack(v.name.key, v.name.tenant.encode(), v.used_ns) for v in victims)
        beside = f"{self._path}.new"
        try:
            with open(beside, "wb") as file:
                file.write(self._records)
            os.rename(beside, self._path)
            self._fd = os.open(self._path, READ)
        except OSError:
            for path in (beside, self._path):
                with suppress(OSError):
                    os.unlink(path)

    def pop(self) -> Victim | None:
        """The next of the newest list, None at its end."""
        if not self._is_newest():
            self._load()
        while self._next < len(self._records):
            record = self._records[self._next : self._next + _RECORD.size]
            self._next += _RECORD.size
            with suppress(struct.error, UnicodeDecodeError, InvalidRequest):
                key, tenant, used_ns = _RECORD.unpack(record)
                return Victim(BlobName(check_tenant(tenant.rstrip(b"\0").decode()), key), used_ns)
        return None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._records, self._next = -1, b"", 0

    def _is_newest(self) -> bool:
        """Or the only one: the disk may have been too full for a file."""
        if not self._path.exists():
            return True
        return self._fd >= 0 and is_same_file(self._path, self._fd)

    def _load(self) -> None:
        self.close()
        with suppress(OSError):
            self._fd = os.open(self._path, READ)
            self._records = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
