"""What an eviction policy is worth: a trace replayed against LRU, Belady's optimum and ours, in memory.

A hit is a block of a request that is there together with all blocks before it: what prefill need not compute. Every
block of a request is used and, if it was missing, written. Belady knows the future and may leave a block out (bypass);
in a chained trace an ancestor's next use comes first, so that its hits are prefixes as well. No policy has more.
"""

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvstore.eviction import LEASE_S, SLOWER
from kvstore.tombstones import MAX_RECORDS
from services.bench.trace import Request

Row = dict[str, str | int | float]

MIN_OF_BELADY = {5000: 0.42}  # part of Belady's hits that must be reached
MAX_BELOW_LRU = 0.01  # of the hit rate


def run(requests: Sequence[Request], sizes: Iterable[int], *, has_limits: bool = False) -> Iterator[Row]:
    """One row a size: hit rates, and hits as parts of Belady's. The limits are those for the published trace."""
    num_blocks = sum(len(request.blocks) for request in requests)
    for size in sizes:
        started_s = time.perf_counter()
        lru, ours = hits(Lru(size), requests), hits(Ours(size), requests)
        best = belady(size, requests)
        row: Row = {
            "bench": "eviction",
            "blocks": size,
            "accesses": num_blocks,
            "lru": round(lru / num_blocks, 4),
            "ours": round(ours / num_blocks, 4),
            "belady": round(best / num_blocks, 4),
            "lru_of_belady": round(lru / max(1, best), 3),
            "ours_of_belady": round(ours / max(1, best), 3),
            "ours_minus_lru": round((ours - lru) / num_blocks, 4),
        }
        if has_limits:
            row["min_ours_minus_lru"] = -MAX_BELOW_LRU
            row |= {"min_ours_of_belady": MIN_OF_BELADY[size]} if size in MIN_OF_BELADY else {}
        yield {**row, "seconds": round(time.perf_counter() - started_s, 2)}


class Policy(Protocol):
    def is_stored(self, block: int) -> bool: ...

    def use(self, blocks: Sequence[int], at_s: float) -> None:
        """One job uses a chain, and writes what was missing; then others make room."""


def hits(policy: Policy, requests: Iterable[Request]) -> int:
    total = 0
    for request in requests:
        total += sum(1 for _ in itertools.takewhile(policy.is_stored, request.blocks))
        policy.use(request.blocks, request.at_s)
    return total


class Lru:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._used: OrderedDict[int, None] = OrderedDict()

    def is_stored(self, block: int) -> bool:
        return block in self._used

    def use(self, blocks: Sequence[int], at_s: float) -> None:
        for block in reversed(blocks):
            self._used[block] = None
            self._used.move_to_end(block)
        while len(self._used) > self._num_blocks:
            self._used.popitem(last=False)


class Ours:
    """`kvstore.eviction` for blocks of one size, each step in constant time."""

    def __init__(self, num_blocks: int, max_tombstones: int = MAX_RECORDS) -> None:
        self._num_blocks = num_blocks
        self._max_tombstones = max_tombstones
        self.once: OrderedDict[int, float] = OrderedDict()  # block -> last use, oldest first, like the next
        self.reused: OrderedDict[int, float] = OrderedDict()
        self._tombstones: OrderedDict[int, None] = OrderedDict()

    def is_stored(self, block: int) -> bool:
        return block in self.once or block in self.reused

    def use(self, blocks: Sequence[int], at_s: float) -> None:
        for block in reversed(blocks):
            if self.once.pop(block, None) is None and block not in self.reused and block not in self._tombstones:
                self.once[block] = at_s
            else:
                self.reused[block] = at_s
                self.reused.move_to_end(block)
        while len(self.once) + len(self.reused) > self._num_blocks:
            self._bury(self.evict(at_s))

    def evict(self, now_s: float) -> int:
        """Takes out the next victim."""
        queue = self.once if self._is_once_next(now_s) else self.reused
        return queue.popitem(last=False)[0]

    def _is_once_next(self, now_s: float) -> bool:
        if not self.once or not self.reused:
            return bool(self.once)
        once_s, reused_s = (now_s - next(iter(used.values())) for used in (self.once, self.reused))
        if min(once_s, reused_s) >= LEASE_S:
            return once_s >= reused_s / SLOWER
        return once_s >= reused_s  # one at least is leased: the older may go

    def _bury(self, block: int) -> None:
        self._tombstones[block] = None
        self._tombstones.move_to_end(block)
        if len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)


def belady(num_blocks: int, requests: Iterable[Request]) -> int:
    """Hits of the policy that always evicts what is needed again last, or never."""
    flat = [block for request in requests for block in request.blocks]
    never = len(flat)
    next_uses = [never] * never
    seen: dict[int, int] = {}
    for index in range(never - 1, -1, -1):
        next_uses[index] = seen.get(flat[index], never)
        seen[flat[index]] = index
    stored: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    total = 0
    for block, next_use in zip(flat, next_uses, strict=True):
        total += block in stored
        if next_use == never:
            stored.pop(block, None)
            continue
        stored[block] = next_use
        heapq.heappush(farthest, (-next_use, block))
        while len(stored) > num_blocks:
            use, victim = heapq.heappop(farthest)
            if stored.get(victim) == -use:
                del stored[victim]
    return total
