"""A data folder with small blocks of several identities and tenants, as workers would have left it."""

import os
from pathlib import Path

import msgspec

from kvstore.codec import codec_named
from kvstore.identities import KnownIdentity, known, record_of, remember
from kvstore.keys import BlockRef, Identity, chain_refs
from kvstore.nvme import NvmeTier
from kvstore.pins import Pin, PinBook, new_pin, pinned_ids
from kvstore.store import KVStore
from services.kv.view import StoreView
from services.settings import Kv
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, payload_of

BUILD = "0123456789ab"


class Shelf:
    def __init__(self, data_dir: Path, identity: Identity = IDENTITY, model: str = "small") -> None:
        self.data_dir = data_dir
        self.root = data_dir / "kv"
        self.identity = identity
        self.tier = NvmeTier(self.root, 10**9)
        self.meet(model)

    def meet(self, model: str, **changes: object) -> Identity:
        """A worker of another identity uses the store, earlier than those before."""
        identity = msgspec.structs.replace(self.identity, **changes)
        record = record_of(identity, model, BUILD, f"{identity.dtype.name.lower()}.of {model}")
        times = {path: path.stat().st_mtime for path in self.root.glob("identities/*")}
        remember(self.root, record)
        (made,) = set(self.root.glob("identities/*")) - set(times)
        before = min(times.values(), default=made.stat().st_mtime)
        os.utime(made, (before - 1, before - 1))
        return identity

    def store(
        self, token_ids: list[int], tenant: str = "default", identity: Identity | None = None, **how: object
    ) -> list[BlockRef]:
        """`how`: codec, ttl_s, salt."""
        identity = identity or self.identity
        geometry = msgspec.structs.replace(GEOMETRY, dtype=identity.dtype)
        refs = chain_refs(identity, tenant, str(how.get("salt", "")), token_ids)
        store = KVStore([self.tier], identity, geometry, codec_named(str(how.get("codec", "lz4"))))
        for ref in refs:
            assert store.save(ref, payload_of(ref, geometry), float(str(how.get("ttl_s", TTL_S))))
        return refs

    def pin(self, token_ids: list[int], tenant: str = "default", text: str = "be brief") -> Pin:
        pin = new_pin("system", "small", tenant, "", text, 1.0)
        PinBook(self.root).add(pin, pinned_ids(self.identity.tokenizer_hash, token_ids))
        return pin

    def path(self, ref: BlockRef) -> Path:
        return Path(self.tier.path(ref.name))

    def damage(self, ref: BlockRef) -> None:
        """Flips one bit of the payload."""
        blob = bytearray(self.path(ref).read_bytes())
        blob[-1] ^= 1
        times = self.path(ref).stat()
        self.path(ref).write_bytes(blob)
        os.utime(self.path(ref), ns=(times.st_atime_ns, times.st_mtime_ns))

    def expire(self, ref: BlockRef) -> None:
        os.utime(self.path(ref), (0, 0))

    def view(self) -> StoreView:
        return StoreView.open(Kv(data_dir=str(self.data_dir)))

    def known(self) -> KnownIdentity:
        return next(found for found in known(self.root) if found.identity == self.identity)
