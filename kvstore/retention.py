"""Which block files go when a folder is full: those used longest ago, so that all of them stay under a byte cap.

Replaceable: the tier only calls `start`, `reserve`, `settle`, `removed` and `make_room`. It learns what other processes
write when it next counts the folder, so several writers may exceed the cap by what they write between two counts.
"""

import heapq
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.counters import TierCounters
from kvstore.filetimes import expires_ns

BLOCKS = "blocks"
QUARANTINE = "quarantine"
_MAX_VICTIMS = 4096
_FIRST_COUNT_S = 2.0  # how long a first write waits for the count of what is there
_MIN_INTERVAL_S = 5.0
_MAX_DUTY = 0.02  # the part of one core that counting may take


class _Victim(NamedTuple):
    rank: int
    size: int
    path: str
    used_ns: int


class ByteCap:
    """Keeps the block files under `root` below `max_bytes`. Thread-safe; counts in the background."""

    def __init__(
        self, root: Path, max_bytes: int, counters: TierCounters, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()  # of the numbers
        self._evicting = threading.Lock()  # of _victims
        self._counted = threading.Event()
        self._counting = False
        self._file_bytes = 0
        self._pending_bytes = 0  # reserved, not settled
        self._since_count_bytes = 0
        self._next_count = 0.0
        self._victims: list[_Victim] = []  # the next to go comes last

    @property
    def used_bytes(self) -> int:
        return self._file_bytes + self._pending_bytes

    def start(self) -> None:
        """Counts what is there in the background, unless a count is running already."""
        with self._lock:
            if self._counting:
                return
            self._counting = True
        threading.Thread(target=self._count, name="kv-count", daemon=True).start()

    def reserve(self, num_bytes: int) -> bool:
        """Makes room for a file that is about to be written; `settle` follows. False: there is none to be had."""
        if num_bytes > self._max_bytes:
            return False
        self._counted.wait(_FIRST_COUNT_S)
        if time.monotonic() >= self._next_count:
            self.start()
        self._add(pending=num_bytes)
        if self._evict_to(self._max_bytes):
            return True
        self._add(pending=-num_bytes)
        return False

    def settle(self, num_bytes: int, written: bool) -> None:
        self._add(pending=-num_bytes, files=num_bytes if written else 0)

    def removed(self, num_bytes: int) -> None:
        self._add(files=-num_bytes)

    def make_room(self, num_bytes: int) -> bool:
        """Evicts that much, for a disk that is full before the cap is reached."""
        return self._evict_to(self.used_bytes - num_bytes)

    def _add(self, files: int = 0, pending: int = 0) -> None:
        with self._lock:
            self._pending_bytes += pending
            self._file_bytes += files
            self._since_count_bytes += files

    def _evict_to(self, target_bytes: int) -> bool:
        if self.used_bytes <= target_bytes:
            return True
        with self._evicting:
            for recount in (False, True):
                if recount:
                    self._victims = self._take_stock()
                while self._victims and self.used_bytes > target_bytes:
                    self._evict(self._victims.pop())
                if self.used_bytes <= target_bytes:
                    return True
            return False

    def _evict(self, victim: _Victim) -> None:
        try:
            if os.stat(victim.path).st_atime_ns != victim.used_ns:
                return  # used since it was counted: the next count puts it where it belongs
            os.unlink(victim.path)
        except FileNotFoundError:
            self.removed(victim.size)  # another process was faster
        except OSError:
            return  # not ours to remove
        else:
            self.removed(victim.size)
            self._counters.add(evicted=1, evicted_bytes=victim.size)

    def _count(self) -> None:
        started = time.monotonic()
        try:
            victims = self._take_stock()
            with self._evicting:
                self._victims = victims
        finally:
            now = time.monotonic()
            with self._lock:
                self._counting = False
                self._next_count = now + max(_MIN_INTERVAL_S, (now - started) / _MAX_DUTY)
            self._counted.set()

    def _take_stock(self) -> list[_Victim]:
        """Sets the number of bytes in use and returns the next victims. Expired files go at once."""
        with self._lock:
            self._since_count_bytes = 0
        total = 0
        found = []
        now_ns = int(self._clock() * 1e9)
        for victim in self._files():
            total += victim.size
            if victim.rank <= now_ns:  # what is dated ahead is kept on purpose (a pin)
                found.append(victim)
        with self._lock:
            # What was written meanwhile may be counted twice: too careful until the next count.
            self._file_bytes = max(0, total + self._since_count_bytes)
        return heapq.nsmallest(_MAX_VICTIMS, found)[::-1]

    def _files(self) -> Iterator[_Victim]:
        now_ns = int(self._clock() * 1e9)
        yield from self._files_in(self._root / QUARANTINE, now_ns, quarantined=True)
        for tenant in _folders(self._root / BLOCKS):
            for folder in _folders(tenant):
                yield from self._files_in(folder, now_ns)

    def _files_in(self, folder: Path, now_ns: int, *, quarantined: bool = False) -> Iterator[_Victim]:
        """Files that vanish under the count are not in it."""
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not quarantined and expires_ns(status) <= now_ns:
                        os.unlink(entry.path)
                        self._counters.add(expired=1)
                        continue
                    rank = 0 if quarantined else status.st_atime_ns
                    yield _Victim(rank, status.st_size, entry.path, status.st_atime_ns)


def _folders(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
