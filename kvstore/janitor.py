"""Keeps a folder of blocks tidy: counts it, removes what expired and what dead writers left, chooses the next victims.

At most one process a host does it at a time, whoever holds the lock; every process looks now and then whether it is
due, so when the one that did it dies the next takes over. (Over a network file system: one for all hosts.)
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.counters import TierCounters
from kvstore.filelock import lock
from kvstore.staging import Staging
from kvstore.stock import StockTaker, Victim
from kvstore.tier import BlobName
from kvstore.tombstones import Reason, Tombstones
from kvstore.usage import Count, Usage

LOCK_FILE = "janitor.lock"
INTERVAL_S = 60.0
CHECK_S = 5.0  # how often each process looks whether it is due
LOCK_WAIT_S = 2.0  # how long a writer waits while another process chooses victims for both
_BACKGROUND_PACE = 0.25
_MAX_DUTY = 0.02  # the part of one core that counting may take over time
_MIN_VICTIMS, _VICTIM_SHARE = 16, 16  # one in so many blocks is chosen at a time: 16 files are looked at for each


class Janitor:
    """One in each process that has the folder open. `publish` gets the next victims, in order."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        counters: TierCounters,
        publish: Callable[[list[Victim]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.usage = Usage(root)
        self.tombstones = Tombstones(root, max(256, max_bytes // 4096), clock)
        self._root = root
        self._counters = counters
        self._publish = publish
        self._clock = clock
        self._staging = Staging(root)
        self._stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, relieve: Callable[[], None]) -> None:
        """Works in the background until `close`; `relieve` evicts what is above the cap."""
        self._thread = threading.Thread(target=self._run, args=(relieve,), name="kv-janitor", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Looks at once whether anything is due."""
        self._wake.set()

    def close(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LOCK_WAIT_S)
        self.usage.close()
        self.tombstones.close()

    def sweep(self, *, wait_s: float = 0.0, since_ns: int | None = None, pace: float = 1.0) -> bool:
        """Does all of it once. False if another process is at it for longer than `wait_s`, or the folder is no good.

        With `since_ns`, a sweep that another process has ended since then will do.
        """
        with suppress(OSError), self._locked(wait_s) as locked:
            if locked and (since_ns is None or self.usage.read().counted_ns <= since_ns):
                self._sweep(pace)
            return locked
        return False

    def _run(self, relieve: Callable[[], None]) -> None:
        while not self._stopping:
            with suppress(OSError):
                self._sweep_if_due(self.usage.read())
                relieve()
            self._wake.wait(CHECK_S)
            self._wake.clear()

    def _sweep_if_due(self, count: Count) -> None:
        if not count.counted_ns:
            self.sweep(since_ns=0)  # writers wait for it
        elif not 0 <= time.time_ns() - count.counted_ns < max(INTERVAL_S * 1e9, count.counting_ns / _MAX_DUTY):
            self.sweep(since_ns=count.counted_ns, pace=_BACKGROUND_PACE)

    def _sweep(self, pace: float) -> None:
        started_ns = time.monotonic_ns()
        before = self.usage.read()
        now_ns = int(self._clock() * 1e9)
        stock = StockTaker(self._root, self._remove_expired, lambda: not self._stopping, pace).take(now_ns)
        if stock is None:
            return
        self._publish(stock.victims(now_ns, max(_MIN_VICTIMS, len(stock) // _VICTIM_SHARE)))
        # Last, because whoever waits for a count takes the victims then.
        self.usage.correct(before, stock.num_bytes, time.time_ns(), int(pace * (time.monotonic_ns() - started_ns)))
        with suppress(OSError):
            self._staging.clean()

    def _remove_expired(self, name: BlobName, entry: os.DirEntry[str]) -> None:
        with suppress(OSError):
            os.unlink(entry.path)
            self.tombstones.record(name, Reason.EXPIRED)
            self._counters.add(expired=1)

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[bool]:
        fd = os.open(self._root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                lock(fd, wait_s)
            except TimeoutError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)
