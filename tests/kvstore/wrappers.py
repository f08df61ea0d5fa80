"""Compositions around a tier: what it is asked, and what goes wrong with it."""

from collections.abc import Sequence

from kvstore.counters import TierCounters
from kvstore.patience import Patience
from kvstore.tier import BlobName, Life, Tier
from schemas.errors import KvUnavailable


class WrappedTier:
    """Passes everything on; `before` sees each call first."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.max_ttl_s = inner.max_ttl_s

    @property
    def counters(self) -> TierCounters:
        return self.inner.counters

    def before(self, method: str) -> None: ...

    def present(self, names: Sequence[BlobName]) -> int:
        self.before("present")
        return self.inner.present(names)

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        self.before("read")
        return self.inner.read(name, into, patience)

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        self.before("write")
        self.inner.write(name, parts, life)

    def touch(self, name: BlobName, life: Life) -> bool:
        self.before("touch")
        return self.inner.touch(name, life)

    def quarantine(self, name: BlobName) -> None:
        self.before("quarantine")
        self.inner.quarantine(name)

    def erase(self, tenant: str) -> int:
        self.before("erase")
        return self.inner.erase(tenant)

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
