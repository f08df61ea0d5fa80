"""A tier as an operator sees it: everything that lies there, whole or not, wanted or not.

Serving never comes here: a reader asks for one block by its name. What walks a tier takes as long as the tier is large.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstore.tier import BlobName, Life
from schemas.blob import BlobHeader


class Entry(NamedTuple):
    """A blob that lies in a tier, expired ones too. `header` None: its first bytes are no header that we wrote."""

    name: BlobName
    size: int
    life: Life
    header: BlobHeader | None

    def is_expired(self, now: float) -> bool:
        return self.life.expires_at <= now


class Quarantined(NamedTuple):
    """A damaged blob that was moved out of the readers' way; `at` in seconds of the wall clock."""

    key: bytes
    size: int
    at: float


class Tidied(NamedTuple):
    """What `tidy` removed. `parts` are temporary files of writers that died; their bytes are not known."""

    quarantined: int = 0
    parts: int = 0
    num_bytes: int = 0


class Inventory(Protocol):
    """Every method may raise `KvUnavailable`. What vanishes meanwhile is left out."""

    name: str

    def tenants(self) -> list[str]:
        """Whose blobs lie there, sorted."""

    def walk(self, tenant: str | None = None) -> Iterator[Entry]:
        """All blobs, or those of a tenant, in no order. Reads of each its header only."""

    def find(self, name: BlobName) -> Entry | None:
        """The entry of one blob."""

    def pieces(self, name: BlobName) -> Iterator[bytes]:
        """A blob's bytes, some megabytes at a time, the last piece perhaps empty. None at all: it is not there."""

    def reason_of(self, name: BlobName) -> str | None:
        """Why a blob that lay there once is gone: evicted, expired or erased; None if nobody remembers."""

    def quarantined(self) -> Sequence[Quarantined]:
        """Oldest first; empty where damaged blobs are not kept."""

    def quarantine(self, name: BlobName) -> None:
        """As `Tier.quarantine`."""

    def remove(self, name: BlobName) -> bool:
        """False: it was gone."""

    def set_life(self, name: BlobName, life: Life) -> bool:
        """Unlike `Tier.touch` also a shorter one. False: it is gone."""

    def tidy(self) -> Tidied:
        """Removes what is quarantined, and what dead writers left."""
