"""A tier behind a breaker: one failure, and it is left alone until a probe beside the requests finds it well again.

So an outage costs the requests that met it their budget once, and the others nothing. Reading and writing are told
apart: what is full or read only can still be read.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvstore.counters import TierCounters
from kvstore.patience import Patience
from kvstore.throttle import ThrottledLog
from kvstore.tier import BlobName, Life, Tier, touch_all
from schemas.errors import KvRefused, KvSkipped, KvUnavailable

PROBE_INTERVAL_S = 2.0

T = TypeVar("T")


class ProbedTier(Tier, Protocol):
    def probe(self) -> None:
        """A small read, then a small write. Raises `KvUnavailable`, or `KvRefused` when only the write fails."""


class GuardedTier:
    """Open: every call raises `KvSkipped` at once. Closed again by the first probe that works."""

    def __init__(self, inner: ProbedTier, probe_interval_s: float | None = None) -> None:
        self.inner = inner
        self.name = inner.name
        self.counters: TierCounters = inner.counters
        self.max_ttl_s = inner.max_ttl_s
        self._interval_s = PROBE_INTERVAL_S if probe_interval_s is None else probe_interval_s
        self._lock = threading.Lock()
        self._no_read = ""  # why it is not read, "" while it is
        self._no_write = ""
        self._probing = False
        self._closed = threading.Event()
        self._log = ThrottledLog(logging.getLogger(__name__))

    @property
    def is_read(self) -> bool:
        return not self._no_read

    @property
    def is_written(self) -> bool:
        return not self._no_write

    @property
    def trouble(self) -> str:
        """Why it is left alone, wholly or by writers; "" when it is not."""
        return self._no_read or self._no_write

    def present(self, names: Sequence[BlobName]) -> int:
        return self._read(lambda: self.inner.present(names))

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        return self._read(lambda: self.inner.read(name, into, patience), patience)

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        if self._no_write:
            self.counters.add(skipped_writes=1)
            raise KvSkipped(self._no_write)
        try:
            self.inner.write(name, parts, life)
        except KvUnavailable as error:
            self._open(error)
            raise

    def touch(self, name: BlobName, life: Life) -> bool:
        return self._read(lambda: self.inner.touch(name, life))

    def touch_many(self, names: Sequence[BlobName], lives: Sequence[Life]) -> list[bool]:
        return self._read(lambda: touch_all(self.inner, names, lives))

    def quarantine(self, name: BlobName) -> None:
        self._read(lambda: self.inner.quarantine(name))

    def erase(self, tenant: str) -> int:
        """Asked also while the breaker is open: nobody must think that it was done when it was not."""
        return self.inner.erase(tenant)

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def _read(self, call: Callable[[], T], patience: Patience | None = None) -> T:
        if self._no_read:
            self.counters.add(skipped_reads=1)
            raise KvSkipped(self._no_read)
        try:
            return call()
        except KvRefused:
            raise  # for this one thing
        except KvUnavailable as error:
            if patience is None or not patience.is_over:  # else it was not given the time
                self._open(error)
            raise

    def _open(self, error: KvUnavailable) -> None:
        with self._lock:
            self._no_write = error.message
            if not isinstance(error, KvRefused):
                self._no_read = error.message
            if self._probing or self._closed.is_set():
                return
            self._probing = True
        self._log.warning("left alone", f"{error.message}; going on without it")
        threading.Thread(target=self._probe_until_well, name=f"kv-probe-{self.name}", daemon=True).start()

    def _probe_until_well(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self.inner.probe()
            except KvRefused as error:
                with self._lock:
                    self._no_read, self._no_write = "", error.message
                continue
            except KvUnavailable as error:
                with self._lock:
                    self._no_read = self._no_write = error.message
                continue
            with self._lock:
                self._no_read = self._no_write = ""
                self._probing = False
            self._log.warning("well again", self.name)
            return
