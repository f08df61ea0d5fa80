"""`KVStore`: verified blocks by reference, whatever tier holds them."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from kvstore.backlog import Backlog
from kvstore.blob import BlobFormat
from kvstore.codec import PLAIN, BlockCodec
from kvstore.counters import StoreCounters
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity
from kvstore.patience import Patience
from kvstore.quantise import NotFinitePage
from kvstore.scratch import Scratch
from kvstore.throttle import ThrottledLog
from kvstore.tier import Life, Tier, touch_all
from schemas.blob import HEADER_BYTES, Codec, DamagedBlob, MismatchedBlob
from schemas.errors import KvSkipped, KvUnavailable

# A block counts as used this much earlier for each token before it, so that under eviction ancestors outlive their
# descendants: what is used at one time is evicted from its end.
_USED_STEP_S = 1e-5


class _Use(NamedTuple):
    """`used_at` None: `now`."""

    ttl_s: float
    now: float
    used_at: float | None
    reused: bool = False

    def life(self, tier: Tier, ref: BlockRef) -> Life:
        used_at = self.now if self.used_at is None else self.used_at
        return Life(used_at - ref.start * _USED_STEP_S, self.now + min(self.ttl_s, tier.max_ttl_s), self.reused)


class KVStore:
    """Blocks of one identity in one or more tiers, fastest first. Synchronous and thread-safe.

    A block that is missing, damaged, somebody else's or out of reach is a miss; which of these is counted and logged.
    A block that only one tier has comes to the others on `copier`'s thread, or at once without one.
    Tiers and copier belong to the caller, who closes them. Raises `SetupError` when identity and geometry contradict.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        identity: Identity,
        geometry: Geometry,
        codec: BlockCodec = PLAIN,
        clock: Callable[[], float] = time.time,
        copier: Executor | None = None,
    ) -> None:
        self.counters = StoreCounters()
        self._backlog = Backlog(copier, self.counters)
        self.tiers = tuple(tiers)
        self._format = BlobFormat(identity, geometry, codec)
        self._clock = clock
        self._heads = Scratch()
        self._blobs = Scratch()
        self._log = ThrottledLog(logging.getLogger(__name__))

    def lookup(self, refs: Sequence[BlockRef]) -> int:
        """How many of `refs`, from the first on without a gap, seem to be there in one tier or another."""
        names = [ref.name for ref in refs]
        found, before = 0, -1
        while before < found < len(names):
            before = found
            for tier in self.tiers:
                try:
                    found += tier.present(names[found:])
                except KvUnavailable as error:
                    self._failed_read(tier, error)
        return found

    def load(self, ref: BlockRef, into: memoryview, patience: Patience | None = None) -> bool:
        """Fills `into`, of exactly a page's size, with the verified block. False: a miss; `into` is undefined.

        No use: a block that is used without its ancestors would outlive them. Whoever uses a chain calls `renew`.
        """
        into = self._checked(ref, into)
        for tier in self.tiers:
            size = self._read(tier, ref, into, patience)
            if size:
                self.counters.add(hits=1, read_bytes=size)
                return True
        self.counters.add(misses=1)
        return False

    def save(
        self,
        ref: BlockRef,
        page: memoryview,
        ttl_s: float,
        *,
        used_at: float | None = None,
        everywhere: bool = True,
        quickly: bool = False,
    ) -> bool:
        """Stores a block in every tier that lacks it, and keeps it for at least `ttl_s`. False: no tier has it now.

        A block that is there already is believed by its size and header, and only touched; one that is torn or not
        ours is replaced. `used_at` (None: now) must be no later than that of the block's ancestors. Without
        `everywhere` it returns once one tier has it, and the slower ones follow. `quickly`: it is stored plain, and
        compressed later on the copier's thread.
        """
        page = self._checked(ref, page)
        use = _Use(ttl_s, self._clock(), used_at)
        plain = quickly and self._backlog.has_thread
        holder: Tier | None = None
        written: list[Tier] = []
        to_follow: list[Tier] = []
        blob: Sequence[memoryview] = ()
        for tier in self.tiers:
            if holder is not None and not everywhere:
                to_follow.append(tier)
            elif self._keep(tier, ref, use):
                holder = holder or tier
            else:
                blob = blob or self._seal(ref, page, plain)
                if self._write(tier, ref, blob, use):
                    holder = holder or tier
                    written.append(tier)
        if plain and written and self._format.compresses:
            self._backlog.add(self._compress, ref, written[0], written, use)
        if holder is not None and to_follow:
            self._backlog.add(self._copy, ref, holder, to_follow, use)
        return holder is not None

    def renew(
        self, refs: Sequence[BlockRef], ttl_s: float, *, used_at: float | None = None, reused: bool = False
    ) -> int:
        """Keeps blocks for `ttl_s` from now on, in every tier, and returns how many were there.

        `refs` are a chain from its first block on. `reused`: by another job than the one that wrote them. Reads no
        block, but for one that is missing in some tier: it is copied there.
        """
        use = _Use(ttl_s, self._clock(), used_at, reused)
        # Ancestors first: at no time does a block seem used later than they are.
        touched = {tier: self._touch_all(tier, refs, use) for tier in self.tiers}
        renewed = 0
        for i, ref in enumerate(refs):
            holders = [tier for tier in self.tiers if touched[tier][i]]
            lacking = [tier for tier in self.tiers if touched[tier][i] is False]
            renewed += bool(holders)
            if holders and lacking:
                self._backlog.add(self._copy, ref, holders[0], lacking, use)
        return renewed

    def snapshot(self) -> dict[str, int]:
        """All counters, those of the tiers as `<tier>_<counter>`, to be exported as metrics."""
        tiers = {f"{tier.name}_{name}": n for tier in self.tiers for name, n in tier.counters.snapshot().items()}
        return {**self.counters.snapshot(), **tiers}

    @property
    def troubles(self) -> list[str]:
        """Why tiers are left alone at the moment, for people to read."""
        found = (getattr(tier, "trouble", "") for tier in self.tiers)
        return [trouble for trouble in found if trouble]

    def _read(self, tier: Tier, ref: BlockRef, into: memoryview, patience: Patience | None) -> int:
        """The size of the blob whose verified block went into `into`; 0: there is none in this tier."""

        def decode(head: memoryview, size: int) -> int:
            self._format.open(ref, head, into, size - HEADER_BYTES)
            return size

        return self._believed(tier, ref, into, decode, patience)

    def _copy(self, ref: BlockRef, source: Tier, targets: Sequence[Tier], use: _Use) -> None:
        """The blob as it is stored, if it is sound."""
        into = self._blobs.take(self._format.page_bytes(ref)).data

        def write(head: memoryview, size: int) -> int:
            stored = into[: size - HEADER_BYTES]
            self._format.check(ref, head, stored)
            for tier in targets:
                self.counters.add(copied=self._write(tier, ref, [head, stored], use))
            return size

        if any(getattr(tier, "is_written", True) for tier in targets):
            self._believed(source, ref, into, write)

    def _compress(self, ref: BlockRef, source: Tier, targets: Sequence[Tier], use: _Use) -> None:
        """Replaces a blob that was stored plain by a smaller one, if the codec pays."""
        into = self._blobs.take(self._format.page_bytes(ref)).data

        def write(head: memoryview, size: int) -> int:
            stored = into[: size - HEADER_BYTES]
            if self._format.check(ref, head, stored) is Codec.NONE:
                blob = self._format.seal_payload(ref, stored)
                for tier in targets if sum(map(len, blob)) < size else ():
                    self._write(tier, ref, blob, use)
            return size

        self._believed(source, ref, into, write)

    def _believed(
        self,
        tier: Tier,
        ref: BlockRef,
        into: memoryview,
        then: Callable[[memoryview, int], int],
        patience: Patience | None = None,
    ) -> int:
        """Reads a blob: its stored payload goes into `into`. The result of `then(head, size)`, which checks it and
        raises what is wrong; 0: there is no such blob."""
        head = self._heads.take(HEADER_BYTES).data
        try:
            # A stored payload is never larger than the page, so `into` has room for it, and for nothing larger.
            size = tier.read(ref.name, [head, into], patience)
            if size is None:
                return 0
            if not HEADER_BYTES < size <= HEADER_BYTES + len(into):
                raise DamagedBlob(f"it has {size} bytes, which no blob of this block can have")
            return then(head, size)
        except KvUnavailable as error:
            self._failed_read(tier, error)
        except DamagedBlob as error:
            self._quarantine(tier, ref, error)
        except MismatchedBlob as error:
            self.counters.add(mismatched=1)
            self._log.warning("mismatch", f"block {_short(ref)} in {tier.name}: {error.message}")
        return 0

    def _keep(self, tier: Tier, ref: BlockRef, use: _Use) -> bool:
        """Touches the block if it is in `tier`, judging by size and header."""
        head = self._heads.take(HEADER_BYTES).data
        try:
            size = tier.read(ref.name, [head])
        except KvUnavailable:
            return False  # the write will say what is wrong
        if size is None or size < HEADER_BYTES or not self._format.describes(ref, head, size):
            return False
        self._touch_all(tier, [ref], use)
        self.counters.add(kept=1)
        return True

    def _seal(self, ref: BlockRef, page: memoryview, plain: bool) -> Sequence[memoryview]:
        """Empty if the block is not one to be stored."""
        try:
            return self._format.seal(ref, page, plain=plain)
        except NotFinitePage as error:
            self.counters.add(refused=1)
            self._log.warning("refused", f"block {_short(ref)} is not stored: {error.message}")
            return ()

    def _write(self, tier: Tier, ref: BlockRef, blob: Sequence[memoryview], use: _Use) -> bool:
        if not blob:
            return False
        try:
            tier.write(ref.name, blob, use.life(tier, ref))
        except KvSkipped:
            return False
        except KvUnavailable as error:
            self.counters.add(write_errors=1)
            self._log.warning("write failed", f"{tier.name}: {error.message}; serving goes on without this block")
            return False
        stored_bytes = sum(map(len, blob))
        self.counters.add(writes=1, payload_bytes=self._format.page_bytes(ref), stored_bytes=stored_bytes)
        return True

    def _touch_all(self, tier: Tier, refs: Sequence[BlockRef], use: _Use) -> Sequence[bool | None]:
        """Whether each is there; None: that cannot be said."""
        try:
            return touch_all(tier, [ref.name for ref in refs], [use.life(tier, ref) for ref in refs])
        except KvUnavailable as error:
            self._failed_read(tier, error)
            return [None] * len(refs)

    def _failed_read(self, tier: Tier, error: KvUnavailable) -> None:
        if isinstance(error, KvSkipped):
            return  # counted by the tier, and told when it began
        self.counters.add(read_errors=1)
        self._log.warning("read failed", f"{tier.name}: {error.message}; it counts as a miss")

    def _quarantine(self, tier: Tier, ref: BlockRef, error: DamagedBlob) -> None:
        self.counters.add(damaged=1)
        self._log.warning("damage", f"block {_short(ref)} in {tier.name}: {error.message}; it will be computed again")
        try:
            tier.quarantine(ref.name)
        except KvUnavailable as unable:
            self._log.warning("quarantine failed", f"{tier.name}: {unable.message}")

    def _checked(self, ref: BlockRef, page: memoryview) -> memoryview:
        """`page` as bytes. `ValueError` when it has another size than the block: a fault of the caller."""
        page = page.cast("B")
        size = self._format.page_bytes(ref)
        if len(page) != size:
            raise ValueError(f"the page of a block of {ref.num_tokens} tokens has {size} bytes, got {len(page)}")
        return page


def _short(ref: BlockRef) -> str:
    return ref.key.hex()[:16]
