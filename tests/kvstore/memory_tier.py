"""A tier in a dictionary: the fake that the contract holds to the same behaviour as the real ones."""

import math
import time
from collections.abc import Callable, Sequence

from kvstore.counters import TierCounters
from kvstore.patience import Patience
from kvstore.tier import BlobName, Life
from schemas.subjects import check_slug


class MemoryTier:
    name = "memory"

    def __init__(self, clock: Callable[[], float] = time.time, max_ttl_s: float = math.inf) -> None:
        self.max_ttl_s = max_ttl_s
        self.counters = TierCounters()
        self.blobs: dict[BlobName, tuple[bytes, Life]] = {}
        self._clock = clock

    def present(self, names: Sequence[BlobName]) -> int:
        return next((index for index, name in enumerate(names) if not self._alive(name)), len(names))

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        if not self._alive(name):
            return None
        blob = memoryview(self.blobs[name][0])
        rest = blob
        for buffer in into:
            size = min(len(buffer), len(rest))
            buffer[:size], rest = rest[:size], rest[size:]
        return len(blob)

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        self.blobs[name] = (b"".join(parts), life)

    def touch(self, name: BlobName, life: Life) -> bool:
        if name not in self.blobs:
            return False
        blob, old = self.blobs[name]
        self.blobs[name] = (
            blob,
            Life(life.used_at, max(old.expires_at, life.expires_at), old.reused or life.reused),
        )
        return True

    def quarantine(self, name: BlobName) -> None:
        if self.blobs.pop(name, None) is not None:
            self.counters.add(quarantined=1)

    def erase(self, tenant: str) -> int:
        check_slug(tenant, "tenant")
        theirs = [name for name in self.blobs if name.tenant == tenant]
        return sum(len(self.blobs.pop(name)[0]) for name in theirs)

    def close(self) -> None:
        pass

    def _alive(self, name: BlobName) -> bool:
        if name in self.blobs and self.blobs[name][1].expires_at <= self._clock():
            del self.blobs[name]
            self.counters.add(expired=1)
        return name in self.blobs
