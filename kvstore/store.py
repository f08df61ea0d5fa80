"""`KVStore`: verified blocks by reference, whatever tier holds them."""

import logging
import time
from collections.abc import Callable, Sequence

from kvstore.blob import BlobFormat
from kvstore.codec import PLAIN, BlockCodec
from kvstore.counters import StoreCounters
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity
from kvstore.scratch import Scratch
from kvstore.throttle import ThrottledLog
from kvstore.tier import Life, Tier
from schemas.blob import HEADER_BYTES, DamagedBlob, MismatchedBlob
from schemas.errors import KvUnavailable

# A block counts as used this much earlier for each token before it, so that under eviction ancestors outlive their
# descendants in whatever order a chain is touched.
_USED_STEP_S = 1e-3


class KVStore:
    """Blocks of one identity in one or more tiers, fastest first. Synchronous and thread-safe.

    A block that is missing, damaged, somebody else's or out of reach is a miss; which of these is counted and logged.
    The tiers belong to the caller, who closes them. Raises `SetupError` when identity and geometry contradict.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        identity: Identity,
        geometry: Geometry,
        codec: BlockCodec = PLAIN,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = StoreCounters()
        self.tiers = tuple(tiers)
        self._format = BlobFormat(identity, geometry, codec)
        self._clock = clock
        self._heads = Scratch()
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

    def load(self, ref: BlockRef, into: memoryview) -> bool:
        """Fills `into`, of exactly the payload's size, with the verified block. False: a miss; `into` is undefined."""
        into = self._checked(ref, into)
        for tier in self.tiers:
            size = self._read(tier, ref, into)
            if size:
                self.counters.add(hits=1, read_bytes=size)
                self._touch(tier, ref, 0.0)
                return True
        self.counters.add(misses=1)
        return False

    def save(self, ref: BlockRef, payload: memoryview, ttl_s: float) -> bool:
        """Stores a block in every tier that lacks it, and keeps it for at least `ttl_s`. False: no tier has it now.

        A block that is there already is believed by its size and header, and only touched; one that is torn or not
        ours is replaced.
        """
        payload = self._checked(ref, payload)
        missing = [tier for tier in self.tiers if not self._keep(tier, ref, ttl_s)]
        blob = self._format.seal(ref, payload) if missing else ()
        written = [self._write(tier, ref, blob, ttl_s) for tier in missing]
        return any(written) or len(missing) < len(self.tiers)

    def renew(self, refs: Sequence[BlockRef], ttl_s: float, *, used_at: float | None = None) -> int:
        """Keeps blocks for `ttl_s` from now on, and returns how many were there. Reads no block.

        `used_at`: when they count as used instead of now; in the future, they are not evicted before.
        """
        renewed = 0
        for ref in reversed(refs):  # the first block last, for tiers that go by their own clock
            touched = [self._touch(tier, ref, ttl_s, used_at) for tier in self.tiers]
            renewed += any(touched)
        return renewed

    def snapshot(self) -> dict[str, int]:
        """All counters, those of the tiers as `<tier>_<counter>`, to be exported as metrics."""
        tiers = {f"{tier.name}_{name}": n for tier in self.tiers for name, n in tier.counters.snapshot().items()}
        return {**self.counters.snapshot(), **tiers}

    def _read(self, tier: Tier, ref: BlockRef, into: memoryview) -> int:
        """The size of the blob whose verified payload went into `into`; 0: there is none in this tier."""
        head = self._heads.take(HEADER_BYTES).data
        try:
            # A stored payload is never larger than the plain one, so `into` has room for it, and for nothing larger.
            size = tier.read(ref.name, [head, into])
            if size is None:
                return 0
            if not HEADER_BYTES < size <= HEADER_BYTES + len(into):
                raise DamagedBlob(f"it has {size} bytes, which no blob of this block can have")
            self._format.open(ref, head, into, size - HEADER_BYTES)
            return size
        except KvUnavailable as error:
            self._failed_read(tier, error)
        except DamagedBlob as error:
            self._quarantine(tier, ref, error)
        except MismatchedBlob as error:
            self.counters.add(mismatched=1)
            self._log.warning("mismatch", f"block {_short(ref)} in {tier.name}: {error.message}")
        return 0

    def _keep(self, tier: Tier, ref: BlockRef, ttl_s: float) -> bool:
        """Touches the block if it is in `tier`, judging by size and header."""
        head = self._heads.take(HEADER_BYTES).data
        try:
            size = tier.read(ref.name, [head])
        except KvUnavailable:
            return False  # the write will say what is wrong
        if size is None or size < HEADER_BYTES or not self._format.describes(ref, head, size):
            return False
        self._touch(tier, ref, ttl_s)
        self.counters.add(kept=1)
        return True

    def _write(self, tier: Tier, ref: BlockRef, blob: Sequence[memoryview], ttl_s: float) -> bool:
        try:
            tier.write(ref.name, blob, self._life(ref, ttl_s))
        except KvUnavailable as error:
            self.counters.add(write_errors=1)
            self._log.warning("write failed", f"{tier.name}: {error.message}; serving goes on without this block")
            return False
        stored_bytes = sum(map(len, blob))
        self.counters.add(writes=1, payload_bytes=self._format.payload_bytes(ref), stored_bytes=stored_bytes)
        return True

    def _touch(self, tier: Tier, ref: BlockRef, ttl_s: float, used_at: float | None = None) -> bool:
        try:
            return tier.touch(ref.name, self._life(ref, ttl_s, used_at))
        except KvUnavailable as error:
            self._failed_read(tier, error)
            return False

    def _life(self, ref: BlockRef, ttl_s: float, used_at: float | None = None) -> Life:
        now = self._clock()
        return Life((now if used_at is None else used_at) - ref.start * _USED_STEP_S, now + ttl_s)

    def _failed_read(self, tier: Tier, error: KvUnavailable) -> None:
        self.counters.add(read_errors=1)
        self._log.warning("read failed", f"{tier.name}: {error.message}; it counts as a miss")

    def _quarantine(self, tier: Tier, ref: BlockRef, error: DamagedBlob) -> None:
        self.counters.add(damaged=1)
        self._log.warning("damage", f"block {_short(ref)} in {tier.name}: {error.message}; it will be computed again")
        try:
            tier.quarantine(ref.name)
        except KvUnavailable as unable:
            self._log.warning("quarantine failed", f"{tier.name}: {unable.message}")

    def _checked(self, ref: BlockRef, payload: memoryview) -> memoryview:
        """`payload` as bytes. `ValueError` when it has another size than the block: a fault of the caller."""
        payload = payload.cast("B")
        size = self._format.payload_bytes(ref)
        if len(payload) != size:
            raise ValueError(f"the payload of a block of {ref.num_tokens} tokens has {size} bytes, got {len(payload)}")
        return payload


def _short(ref: BlockRef) -> str:
    return ref.key.hex()[:16]
