"""Which blocks make room for others.

1. Blocks used within the last `LEASE_S` are leased: jobs that run or wait need them. They go when nothing else is left.
2. A block is *reused* once a second job has asked for it: while it was stored, or after it was gone, for as long as the
   tombstones remember that.
3. Of all others the oldest goes first; a reused block ages `SLOWER` times more slowly since its last use.

A block whose last use is dated well ahead (a pin) is kept on purpose until then.

A new block is never refused: prefill hands it over through the store. What was used later and is reused stays longer:
if the ancestors of a block are used no earlier than it, and are reused where it is, they outlive it. A block that is
written after the order was made has leased ancestors, which are not in it. Only when all are leased, since jobs in
flight use more than the cap, may a block go whose descendant is still to come.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.filetimes import AHEAD_NS

LEASE_S = 20.0
SLOWER = 5


def eviction_order(used_ns: NDArray[np.int64], reused: NDArray[np.bool_], now_ns: int) -> NDArray[Any]:
    """Indices of the blocks that may go, the next to go first. Leased ones are among them only if all are leased."""
    age_ns = now_ns - used_ns
    free = np.flatnonzero(age_ns >= int(LEASE_S * 1e9))
    if not len(free):
        leased = np.flatnonzero(age_ns >= -AHEAD_NS)
        return leased[np.argsort(used_ns[leased], kind="stable")]
    counted_ns = np.where(reused, age_ns // SLOWER, age_ns)
    return free[np.argsort(-counted_ns[free], kind="stable")]
