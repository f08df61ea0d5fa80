"""A tier in a dictionary: the fake that the contract holds to the same behaviour as the real ones."""

import time
from collections.abc import Callable, Sequence

from kvstore.counters import TierCounters
from kvstore.tier import Life


class MemoryTier:
    name = "memory"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.counters = TierCounters()
        self.blobs: dict[bytes, tuple[bytes, Life]] = {}
        self._clock = clock

    def present(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if not self._alive(key)), len(keys))

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        if not self._alive(key):
            return None
        blob = memoryview(self.blobs[key][0])
        rest = blob
        for buffer in into:
            size = min(len(buffer), len(rest))
            buffer[:size], rest = rest[:size], rest[size:]
        return len(blob)

    def write(self, key: bytes, parts: Sequence[memoryview], life: Life) -> None:
        self.blobs[key] = (b"".join(parts), life)

    def touch(self, key: bytes, life: Life) -> bool:
        if key not in self.blobs:
            return False
        blob, old = self.blobs[key]
        self.blobs[key] = (blob, Life(life.used_at, max(old.expires_at, life.expires_at)))
        return True

    def quarantine(self, key: bytes) -> None:
        if self.blobs.pop(key, None) is not None:
            self.counters.add(quarantined=1)

    def close(self) -> None:
        pass

    def _alive(self, key: bytes) -> bool:
        if key in self.blobs and self.blobs[key][1].expires_at <= self._clock():
            del self.blobs[key]
            self.counters.add(expired=1)
        return key in self.blobs
