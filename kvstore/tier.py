"""What a place for blobs must do. A tier moves bytes under names; it knows nothing of what is in them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.counters import TierCounters
from kvstore.patience import Patience
from schemas.subjects import check_slug


class Life(NamedTuple):
    """When a block was last wanted and until when it may be kept, in seconds of the wall clock.

    `used_at` only orders blocks for eviction; well in the future it keeps a block from being evicted until then. A
    touch with a later value prolongs a life, an earlier one does not cut it.
    `reused`: another job than the one that wrote the block has asked for it; once said it stays so.
    """

    used_at: float
    expires_at: float
    reused: bool = False


class BlobName(NamedTuple):
    """Where a blob lies. The key of 32 bytes would do; the tenant is there so that what is his can be found and erased.

    A tenant passes `check_tenant`: it may be part of a path or of another server's key.
    """

    tenant: str
    key: bytes


SHARED_TENANT = "_shared"  # of prefixes that the operator pinned for all; no slug, so nobody can publish for it


def check_tenant(tenant: str) -> str:
    """Returns whose blobs these are, if anybody's can be. Raises `InvalidRequest`."""
    return tenant if tenant == SHARED_TENANT else check_slug(tenant, "tenant")


class Tier(Protocol):
    """Synchronous and thread-safe. A miss is a value; an outage is `KvUnavailable`, which every method may raise.

    Readers see a blob whole, an older one whole, or none: never a mixture made by a writer, though what they see may
    have been damaged since.
    """

    name: str
    counters: TierCounters
    max_ttl_s: float  # blocks live no longer here after their last use, whatever the caller asks; inf: as asked

    def present(self, names: Sequence[BlobName]) -> int:
        """How many of `names`, from the first on without a gap, seem to be there. Reads no blob."""

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        """Scatters the blob over `into`; what does not fit is left out. Returns the size of the blob, None: a miss.

        A tier that may take long stops, with `KvUnavailable`, when `patience` is over or given up.
        """

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        """Stores the parts as one blob; replaces an older one. May make room by evicting others."""

    def touch(self, name: BlobName, life: Life) -> bool:
        """Prolongs a blob's life. False: it is not there, or cannot be touched."""

    def quarantine(self, name: BlobName) -> None:
        """Takes a damaged blob out of the readers' way. Nothing happens when it is gone already."""

    def erase(self, tenant: str) -> int:
        """Removes every blob of a tenant that was stored before the call, those in quarantine too. Returns their bytes.

        What is being written meanwhile may be stored after it. Raises `InvalidRequest` for what is no slug, and
        `KvUnavailable` when a blob could not be removed: others may be gone by then.
        """

    def close(self) -> None:
        """Gives back what the tier holds outside of this process, its blobs excepted."""


def touch_all(tier: Tier, names: Sequence[BlobName], lives: Sequence[Life]) -> list[bool]:
    """`touch` for many, in the order given; in one go where the tier can."""
    many: Callable[[Sequence[BlobName], Sequence[Life]], list[bool]] | None = getattr(tier, "touch_many", None)
    if many is not None:
        return many(names, lives)
    return [tier.touch(name, life) for name, life in zip(names, lives, strict=True)]
