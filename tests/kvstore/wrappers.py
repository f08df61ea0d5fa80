"""Compositions around a tier: what it is asked, and what goes wrong with it."""

from collections.abc import Sequence

from kvstore.counters import TierCounters
from kvstore.tier import Life, Tier
from schemas.errors import KvUnavailable


class WrappedTier:
    """Passes everything on; `before` sees each call first."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name

    @property
    def counters(self) -> TierCounters:
        return self.inner.counters

    def before(self, method: str) -> None: ...

    def present(self, keys: Sequence[bytes]) -> int:
        self.before("present")
        return self.inner.present(keys)

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.before("read")
        return self.inner.read(key, into)

    def write(self, key: bytes, parts: Sequence[memoryview], life: Life) -> None:
        self.before("write")
        self.inner.write(key, parts, life)

    def touch(self, key: bytes, life: Life) -> bool:
        self.before("touch")
        return self.inner.touch(key, life)

    def quarantine(self, key: bytes) -> None:
        self.before("quarantine")
        self.inner.quarantine(key)

    def close(self) -> None:
        self.inner.close()


class MeteredTier(WrappedTier):
    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: list[str] = []

    def before(self, method: str) -> None:
        self.calls.append(method)


class FaultyTier(WrappedTier):
    """Out of reach for the methods in `broken`."""

    def __init__(self, inner: Tier, *broken: str) -> None:
        super().__init__(inner)
        self.broken = set(broken)

    def before(self, method: str) -> None:
        if method in self.broken:
            raise KvUnavailable(f"{method} was made to fail")
