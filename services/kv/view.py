"""The store of a data folder, opened to be looked into: its tiers, who used it, what is pinned there."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.identities import KnownIdentity, known
from kvstore.inventory import Entry, Inventory
from kvstore.nvme_inventory import NvmeInventory
from kvstore.pins import Pin, PinBook
from kvstore.redis import RedisTier
from kvstore.redis.inventory import RedisInventory
from kvstore.tier import BlobName
from schemas.blob import BlobHeader
from schemas.errors import JobNotFound, KvRefused, KvUnavailable, SetupError
from services.config import redis_url
from services.settings import Kv

Tick = Callable[[], None]

_TIMEOUT_S = 5.0  # an operator waits longer than a request


def _nothing() -> None:
    return None


class Held(NamedTuple):
    """A blob and the tier that it was found in."""

    tier: Inventory
    entry: Entry


class Choice(NamedTuple):
    """Which blobs are meant. What is empty leaves nothing out; `unused_s`: not used for so long."""

    tenant: str = ""
    model: str = ""
    unused_s: float = 0.0


ALL = Choice()


class StoreView:
    """Reads and changes nothing by itself. `tick` is called once a blob, for whoever shows progress."""

    def __init__(self, root: Path, tiers: list[Inventory], clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.tiers = tiers
        self.clock = clock
        self.pins = PinBook(root)
        self.identities = known(root)
        self.tick: Tick = _nothing
        self.left_out: list[str] = []  # why a tier is not among them
        self.close: Tick = _nothing
        self._models = {_place(k): k.record.model for k in reversed(self.identities)}

    @classmethod
    def open(cls, settings: Kv) -> "StoreView":
        """Raises `SetupError` if there is no store in the data folder."""
        root = Path(settings.data_dir) / "kv"
        if not root.is_dir():
            raise SetupError(
                f"there is no KV store in {Path(settings.data_dir).absolute()}: name its folder with --data"
            )
        view = cls(root, [NvmeInventory(root)])
        if url := redis_url(settings):
            view._add_redis(RedisTier(url, is_cluster=settings.redis_cluster, timeout_s=_TIMEOUT_S))
        return view

    def _add_redis(self, tier: RedisTier) -> None:
        self.close = tier.close
        try:
            tier.probe()
        except KvRefused:
            pass  # it can be looked at
        except KvUnavailable as error:
            self.left_out.append(error.message)
            return
        self.tiers.append(RedisInventory(tier, self.clock))

    def model_of(self, header: BlobHeader) -> str:
        """The model's slug; of one whose workers never told their identity, a part of its fingerprint."""
        return self._models.get(header.fingerprint, header.fingerprint.hex()[:12])

    def held(self, choice: Choice = ALL) -> Iterator[Held]:
        """In no order."""
        unused_since = self.clock() - choice.unused_s
        for tier in self.tiers:
            for entry in tier.walk(choice.tenant or None):
                self.tick()
                if choice.unused_s and entry.life.used_at > unused_since:
                    continue
                if not choice.model or (entry.header is not None and self.model_of(entry.header) == choice.model):
                    yield Held(tier, entry)

    def named(self, prefix: str) -> list[Held]:
        """One block, by the beginning of its key in hex, in every tier that has it.

        Raises `SetupError` if it is no hex or several blocks begin with it, and `JobNotFound` if none does.
        """
        wanted = prefix.lower()
        if not wanted or set(wanted) - set("0123456789abcdef"):
            raise SetupError(f"{prefix!r} is no key: give the first hex digits of one, as `kvrelay kv ls` shows them")
        found = [held for held in self.held() if held.entry.name.key.hex().startswith(wanted)]
        names = {held.entry.name for held in found}
        if not found:
            raise JobNotFound(f"no block's key begins with {prefix}: `kvrelay kv ls` lists them")
        if len(names) > 1:
            raise SetupError(f"{len(names)} blocks have a key that begins with {prefix}: give more of it")
        return found

    def pinned(self) -> dict[BlobName, Pin]:
        """Every block that a pin keeps, under any identity that has used the store."""
        return {
            ref.name: pin
            for known in self.identities
            for pin, refs in self.pins.refs(known.record.model, known.identity)
            for ref in refs
        }


def _place(known: KnownIdentity) -> bytes:
    return known.identity.fingerprint
