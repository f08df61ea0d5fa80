"""How many bytes of blocks lie in a folder: one counter in a small file, shared by all processes that use it.

Every change is made under a lock on the file, so the counter is exact while nobody else touches the folder. It outlives
the processes; the janitor corrects it by counting, which takes a while, so it never waits for one to begin.
"""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.filelock import lock, unlock

FILE = "usage"
_FORMAT = struct.Struct("<4sI6q")
_MAGIC = b"KVRU"
_VERSION = 1


@dataclass
class Count:
    """`pending_bytes` are reserved for writes under way; `idle_pending_bytes` is the least of them since the last
    count. `written_bytes` only grows. `counted_ns` is when the folder was counted last (0: never), `counting_ns` how
    long that took, by the wall clock.
    """

    file_bytes: int = 0
    pending_bytes: int = 0
    idle_pending_bytes: int = 0
    written_bytes: int = 0
    counted_ns: int = 0
    counting_ns: int = 0

    @property
    def total_bytes(self) -> int:
        return self.file_bytes + self.pending_bytes


class Usage:
    """Thread-safe. Every method raises `OSError` when the folder cannot be written."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._lock = threading.Lock()
        self._fd = -1

    def read(self) -> Count:
        with self._changing(write=False) as count:
            return count

    def reserve(self, num_bytes: int) -> Count:
        """Counts a write that is about to begin, and returns the new count."""
        with self._changing() as count:
            count.pending_bytes += num_bytes
            return count

    def settle(self, num_bytes: int, written_bytes: int, replaced_bytes: int = 0) -> None:
        """The write is over."""
        with self._changing() as count:
            count.pending_bytes = max(0, count.pending_bytes - num_bytes)
            count.idle_pending_bytes = min(count.idle_pending_bytes, count.pending_bytes)
            count.written_bytes += written_bytes
            count.file_bytes = max(0, count.file_bytes + written_bytes - replaced_bytes)

    def removed(self, num_bytes: int) -> int:
        with self._changing() as count:
            count.file_bytes = max(0, count.file_bytes - num_bytes)
            return count.total_bytes

    def correct(self, before: Count, found_bytes: int, now_ns: int, counting_ns: int) -> None:
        """`found_bytes` were counted in the folder since the counter was `before`.

        What was written meanwhile may have been found as well: it counts twice until the next time, which errs on the
        safe side. What stayed pending all the time since the last count was reserved by a process that is dead.
        """
        with self._changing() as count:
            count.file_bytes = found_bytes + count.written_bytes - before.written_bytes
            count.pending_bytes -= count.idle_pending_bytes
            count.idle_pending_bytes = count.pending_bytes
            count.counted_ns, count.counting_ns = now_ns, counting_ns

    def close(self) -> None:
        with self._lock:
            self._close()

    @contextmanager
    def _changing(self, write: bool = True) -> Iterator[Count]:
        with self._lock:
            self._open()
            lock(self._fd)
            try:
                count = self._parse(os.pread(self._fd, _FORMAT.size, 0))
                yield count
                if write:
                    os.pwrite(self._fd, _FORMAT.pack(_MAGIC, _VERSION, *vars(count).values()), 0)
            finally:
                unlock(self._fd)

    def _parse(self, data: bytes) -> Count:
        with suppress(struct.error):
            magic, version, *numbers = _FORMAT.unpack(data)
            if (magic, version) == (_MAGIC, _VERSION) and min(numbers) >= 0:
                return Count(*numbers)
        return Count()

    def _open(self) -> None:
        """A file that somebody removed is made anew: nothing is known then."""
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self._close()
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(self._path, flags, 0o600)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
