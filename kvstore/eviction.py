"""Which blocks make room for others.

1. Blocks used within the last `LEASE_S` are leased: jobs that run or wait need them. They go when nothing else is left.
2. A block is *reused* once a second job has asked for it: while it was stored, or after it was evicted, as long as the
   tombstones remember that.
3. The reused blocks used last, up to `PROTECTED_SHARE` of the cap, are protected.
4. All others go first, and then the protected ones; in both groups the one unused for longest goes first.

A new block is never refused: prefill hands it over through the store. What was used later and is reused stays longer:
if the ancestors of a block are used no earlier than it, and are reused where it is, they outlive it. A block that is
written after the order was made has leased ancestors, which are not in it. Only when all are leased, since jobs in
flight use more than the cap, may a block go whose descendant is still to come.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEASE_S = 20.0
PROTECTED_SHARE = 0.7

Times = NDArray[np.int64]


def eviction_order(
    used_ns: Times, sizes: NDArray[np.int64], reused: NDArray[np.bool_], now_ns: int, max_bytes: int
) -> NDArray[Any]:
    """Indices of the blocks that may go, the next to go first. Leased ones are among them only if all are leased."""
    rank = np.zeros(len(used_ns), np.uint8)
    candidates = np.flatnonzero(reused)
    newest_first = candidates[np.argsort(-used_ns[candidates], kind="stable")]
    protected = newest_first[np.cumsum(sizes[newest_first]) <= PROTECTED_SHARE * max_bytes]
    rank[protected] = 1
    order = np.lexsort((used_ns, rank))
    free = order[used_ns[order] <= now_ns - int(LEASE_S * 1e9)]
    return free if len(free) else np.argsort(used_ns, kind="stable")
