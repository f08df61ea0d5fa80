"""Why a block is gone: a bounded ring of records in one file, shared by all processes that use the folder.

Records are appended under a lock on the file, so the newest `max_records` are there, exactly. Nothing is mapped: a disk
that is full or a file that somebody cut must raise an error, not a signal. Everything here is best effort: without the
file nobody knows why, and blocks come and go all the same.
"""

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.filelock import lock, unlock
from kvstore.tier import BlobName

FILE = "tombstones"
MAX_RECORDS = 65_536
_MAGIC = b"KVRT"
_VERSION = 1
_HEADER = struct.Struct("<4sIQQ40x")  # magic, version, records in the ring, records ever written
_RECORD = struct.Struct("<32sqB7x")  # key, nanoseconds of the wall clock, reason
_RECORDS = np.dtype({"names": ["key", "reason"], "formats": ["<u8", "u1"], "offsets": [0, 40], "itemsize": 48})


class Reason(IntEnum):
    EVICTED = 1
    EXPIRED = 2
    DAMAGED = 3
    ERASED = 4


class Tombstone(NamedTuple):
    """`at` in seconds of the wall clock."""

    reason: Reason
    at: float


class Tombstones:
    """Thread-safe. `max_records` counts when the file is made; afterwards the file says how many it holds."""

    def __init__(self, root: Path, max_records: int = MAX_RECORDS, clock: Callable[[], float] = time.time) -> None:
        self._path = root / FILE
        self._max_records = min(max_records, MAX_RECORDS)
        self._clock = clock
        self._lock = threading.Lock()
        self._fd, self._capacity, self._num_seen = -1, 0, 0
        self._keys = np.zeros(0, "<u8")  # the first bytes of each record's key, as a number
        self._reasons = np.zeros(0, "u1")  # 0: never written

    def record(self, name: BlobName, reason: Reason) -> None:
        packed = _RECORD.pack(name.key, int(self._clock() * 1e9), reason)
        with self._lock, suppress(OSError), self._locked() as num_written:
            os.pwrite(self._fd, packed, _HEADER.size + num_written % self._capacity * _RECORD.size)
            self._write_header(num_written + 1)

    def reason_of(self, name: BlobName) -> Tombstone | None:
        """The newest record of a block, or None. That the block was written again since is not known here."""
        with self._lock, suppress(OSError):
            self._catch_up()
            slots = np.flatnonzero((self._keys == _short(name)) & (self._reasons > 0))
            for slot in sorted(slots.tolist(), key=self._age):
                offset = _HEADER.size + slot * _RECORD.size
                key, at_ns, reason = _RECORD.unpack(os.pread(self._fd, _RECORD.size, offset).ljust(_RECORD.size))
                if key == name.key and reason in list(Reason):
                    return Tombstone(Reason(reason), at_ns / 1e9)
        return None

    def remembers(self, name: BlobName) -> bool:
        """Whether a block was here not long ago. Some 20 us; keys that begin alike may be taken for each other."""
        with self._lock, suppress(OSError):
            self._catch_up()
            return bool(np.any((self._keys == _short(name)) & (self._reasons > 0)))
        return False

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _age(self, slot: int) -> int:
        """How many records were written after the one in `slot`."""
        return int((self._num_seen - 1 - slot) % self._capacity)

    def _catch_up(self) -> None:
        """Reads what was written since, by this process or another, into the image of the ring."""
        num_written = self._opened()
        if num_written < self._num_seen:
            self._capacity = 0  # made anew by another process
            self._read_header()
        first = max(self._num_seen, num_written - self._capacity)
        while first < num_written:
            slot = first % self._capacity
            count = min(num_written - first, self._capacity - slot)
            data = os.pread(self._fd, count * _RECORD.size, _HEADER.size + slot * _RECORD.size)
            records = np.frombuffer(data[: len(data) // _RECORD.size * _RECORD.size], _RECORDS)
            self._keys[slot : slot + len(records)] = records["key"]
            self._reasons[slot : slot + len(records)] = records["reason"]
            first += count
        self._num_seen = num_written

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Holds the file's lock; gives the number of records ever written. Makes a file that is no ring anew."""
        self._opened()
        lock(self._fd)
        try:
            num_written = self._read_header()
            if num_written is None:
                os.ftruncate(self._fd, 0)
                self._resize(self._max_records)
                self._write_header(num_written := 0)
            yield num_written
        finally:
            unlock(self._fd)

    def _opened(self) -> int:
        """The number of records ever written. A file that somebody removed is opened anew."""
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self._forget()
        if self._fd < 0:
            flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o600)
            except OSError:
                self._fd = os.open(self._path, os.O_RDONLY | flags)
        return self._read_header() or 0

    def _read_header(self) -> int | None:
        data = os.pread(self._fd, _HEADER.size, 0)
        if len(data) < _HEADER.size:
            return None
        magic, version, capacity, num_written = _HEADER.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION) or not 0 < capacity <= MAX_RECORDS:
            return None
        self._resize(capacity)
        return int(num_written)

    def _write_header(self, num_written: int) -> None:
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, _VERSION, self._capacity, num_written), 0)

    def _resize(self, capacity: int) -> None:
        if capacity != self._capacity:
            self._capacity = capacity
            self._num_seen = 0
            self._keys = np.zeros(capacity, "<u8")
            self._reasons = np.zeros(capacity, "u1")

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._capacity, self._num_seen = -1, 0, 0


def _short(name: BlobName) -> int:
    return int.from_bytes(name.key[:8], "little")
