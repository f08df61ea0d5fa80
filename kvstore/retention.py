"""Keeps the block files of a folder under a byte cap, together with all other processes that write there.

A writer reserves its bytes in the shared counter first and then evicts until the counter is under the cap, so the cap
holds whoever writes. Which blocks go is chosen for all processes at once: see `kvstore.janitor` and `kvstore.eviction`.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.blockfile import QUARANTINE, path_of
from kvstore.counters import TierCounters
from kvstore.janitor import LOCK_WAIT_S, Janitor
from kvstore.stock import Victim, files_in
from kvstore.tombstones import Reason
from kvstore.usage import Count
from kvstore.victims import Victims
from schemas.errors import KvRefused, KvUnavailable

_FIRST_COUNT_S = 2.0  # how long a write waits for the count of a folder that was never counted
_POLL_S = 0.02
EVICT_S = 2.0  # how long a write may evict before it is given up
_SLACK_BYTES = 65_536  # files take whole pages of a disk, and the counter, tombstones and victims a few


class ByteCap:
    """Thread-safe. Its methods raise `OSError` when the folder cannot be written."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        counters: TierCounters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._counters = counters
        self._victims = Victims(root)
        self._choosing = threading.Lock()  # of _victims
        self._evicting = threading.Lock()
        self._num_popped = 0
        self.janitor = Janitor(root, max_bytes, counters, self._publish, clock)
        self._usage = self.janitor.usage

    @property
    def used_bytes(self) -> int:
        return self._usage.read().total_bytes

    def reserve(self, num_bytes: int) -> None:
        """Makes room for a file that is about to be written; `settle` follows. Raises `KvRefused` if there is none
        to be had."""
        if num_bytes > self._max_bytes:
            raise KvRefused(f"a block of {num_bytes} bytes is larger than the cap of {self._root}")
        count = self._usage.reserve(num_bytes)
        try:
            if not count.counted_ns:
                count = self._counted()
            if count.total_bytes > self._max_bytes and not self._evict_to(self._max_bytes):
                raise KvRefused(f"{self._root} is at its cap and nothing can be evicted in time for {num_bytes} bytes")
        except BaseException:
            self._usage.settle(num_bytes, 0)
            raise

    def settle(self, num_bytes: int, written_bytes: int, replaced_bytes: int = 0) -> None:
        self._usage.settle(num_bytes, written_bytes, replaced_bytes)

    def removed(self, num_bytes: int) -> None:
        """A file is gone that was not evicted."""
        with suppress(OSError):
            self._usage.removed(num_bytes)

    def make_room(self, num_bytes: int) -> bool:
        """Evicts that much, for a disk that is full before the cap is reached. False: nothing went."""
        used = self.used_bytes
        self._evict_to(max(0, used - num_bytes - _SLACK_BYTES))
        return self.used_bytes < used

    def start(self) -> None:
        """Works in the background until `close`."""
        self.janitor.start(self._relieve)

    def close(self) -> None:
        self.janitor.close()
        with self._choosing:
            self._victims.close()

    def _counted(self) -> Count:
        """Only where nothing is known: the counter outlives the processes."""
        deadline_s = time.monotonic() + _FIRST_COUNT_S
        while not (count := self._usage.read()).counted_ns:
            if time.monotonic() > deadline_s:
                raise KvUnavailable(f"what {self._root} holds is still being counted")
            self.janitor.hurry()
            time.sleep(_POLL_S)
        return count

    def _publish(self, victims: list[Victim]) -> None:
        with self._choosing:
            self._victims.publish(victims)

    def _pop(self) -> Victim | None:
        with self._choosing:
            victim = self._victims.pop()
        self._num_popped += victim is not None
        return victim

    def _relieve(self) -> None:
        """For a folder that was filled under a larger cap, whether anybody writes or not."""
        if self._usage.read().total_bytes > self._max_bytes:
            self._evict_to(self._max_bytes)

    def _evict_to(self, target_bytes: int) -> bool:
        """A list of victims is used up before the next is made, so that no ancestor goes before its descendants.

        Gives up after some seconds, when much more than a block has to go: what follows goes on with it.
        """
        deadline_s = time.monotonic() + EVICT_S
        if not self._evicting.acquire(timeout=EVICT_S):
            return False
        try:
            if self._evict_listed(target_bytes, deadline_s):
                return True
            # Another process may just have ended the sweep whose list was used up here before: so twice.
            num_vain = 0
            while num_vain < 2 and time.monotonic() < deadline_s and self._sweep():
                self._num_popped = 0
                if self._evict_listed(target_bytes, deadline_s):
                    return True
                num_vain = 0 if self._num_popped else num_vain + 1
            return False
        finally:
            self._evicting.release()

    def _sweep(self) -> bool:
        return self.janitor.sweep(wait_s=LOCK_WAIT_S, since_ns=self._usage.read().counted_ns)

    def _evict_listed(self, target_bytes: int, deadline_s: float) -> bool:
        total = self._usage.read().total_bytes
        if total > target_bytes:
            total = self._evict_quarantined(total, target_bytes)
        while total > target_bytes:
            victim = self._pop() if time.monotonic() < deadline_s else None
            if victim is None:
                return False
            total = self._evict(victim)
        return True

    def _evict_quarantined(self, total: int, target_bytes: int) -> int:
        for entry, status in files_in(self._root / QUARANTINE):
            if total > target_bytes:
                with suppress(OSError):
                    os.unlink(entry.path)
                    self._counters.add(evicted=1, evicted_bytes=status.st_size)
                    total = self._usage.removed(status.st_size)
        return total

    def _evict(self, victim: Victim) -> int:
        """The bytes in use afterwards."""
        path = path_of(self._root, victim.name)
        try:
            status = os.stat(path, follow_symlinks=False)
            if status.st_atime_ns == victim.used_ns:  # else it was used since, and the next list has its new place
                os.unlink(path)
                self.janitor.tombstones.record(victim.name, Reason.EVICTED)
                self._counters.add(evicted=1, evicted_bytes=status.st_size)
                return self._usage.removed(status.st_size)
        except OSError:
            pass  # gone already, or not ours to remove
        return self._usage.read().total_bytes
