"""How many threads a pass may use."""

from typing import NamedTuple, Protocol


class Lease(NamedTuple):
    """Of one pass: as many threads as it has cores of its `own`, and those that are `lent` to it.

    `revoked` is the address of an int32 that becomes other than 0 when a lent core is wanted back: who can, looks at it
    now and then and goes on with its own threads.
    """

    own: int
    lent: int
    revoked: int


class Cores(Protocol):
    def begin(self) -> Lease:
        """A pass begins. Called by the thread that computes it."""

    def end(self) -> None:
        """It is over."""
