"""Which blocks make room for others.

1. Blocks used within the last `LEASE_S` are leased: jobs that run or wait need them. They go when nothing else is left.
2. A block is *reused* once a second job has asked for it: while it was stored, or after it was evicted, as long as the
   tombstones remember that.
3. The reused blocks used last, up to `PROTECTED_SHARE` of the cap, are protected.
4. All others go first, and then the protected ones; in both groups the one unused for longest goes first.

A block whose last use is dated well ahead is kept on purpose until then: a pin.

A new block is never refused: prefill hands it over through the store. Whatever is used last and reused is kept longer,
so if the ancestors of a block are used no earlier than it is, and are reused where it is, they outlive it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.filetimes import AHEAD_NS

LEASE_S = 20.0
PROTECTED_SHARE = 0.7

Times = NDArray[np.int64]


def eviction_order(
    used_ns: Times, sizes: NDArray[np.int64], reused: NDArray[np.bool_], now_ns: int, max_bytes: int
) -> NDArray[Any]:
    """Indices of the blocks that may go, the next one first."""
    rank = np.zeros(len(used_ns), np.uint8)
    candidates = np.flatnonzero(reused)
    newest_first = candidates[np.argsort(-used_ns[candidates], kind="stable")]
    protected = newest_first[np.cumsum(sizes[newest_first]) <= PROTECTED_SHARE * max_bytes]
    rank[protected] = 1
    rank[used_ns > now_ns - int(LEASE_S * 1e9)] = 2
    order = np.lexsort((used_ns, rank))
    return order[used_ns[order] <= now_ns + AHEAD_NS]
