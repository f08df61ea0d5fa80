"""What a place for blobs must do. A tier moves bytes under 32-byte keys; it knows nothing of what is in them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstore.counters import TierCounters


class Life(NamedTuple):
    """When a block was last wanted and until when it may be kept, in seconds of the wall clock.

    `used_at` only orders blocks for eviction. A later `expires_at` prolongs a life, an earlier one does not cut it.
    """

    used_at: float
    expires_at: float


class Tier(Protocol):
    """Synchronous and thread-safe. A miss is a value; an outage is `KvUnavailable`, which every method may raise.

    Readers see a blob whole, an older one whole, or none: never a mixture made by a writer, though what they see may
    have been damaged since.
    """

    name: str
    counters: TierCounters

    def present(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on without a gap, seem to be there. Reads no blob."""

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Scatters the blob over `into`; what does not fit is left out. Returns the size of the blob, None: a miss."""

    def write(self, key: bytes, parts: Sequence[memoryview], life: Life) -> None:
        """Stores the parts as one blob; replaces an older one. May make room by evicting others."""

    def touch(self, key: bytes, life: Life) -> bool:
        """Prolongs a blob's life. False: it is not there, or cannot be touched."""

    def quarantine(self, key: bytes) -> None:
        """Takes a damaged blob out of the readers' way. Nothing happens when it is gone already."""

    def close(self) -> None:
        """Gives back what the tier holds outside of this process, its blobs excepted."""
