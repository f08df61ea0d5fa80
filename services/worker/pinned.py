"""The pins of a worker's model: checked, in its own tokens, and kept alive in the store.

Every method may block on the store's disk, and belongs to one store thread at a time.
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

from kvstore.keys import BlockRef, Identity
from kvstore.pins import Pin, PinBook, pin_refs, shared_prefixes
from kvstore.pins import pinned_ids as with_hash
from kvstore.shared_prefix import SharedPrefixes
from kvstore.store import KVStore
from schemas.errors import KvrelayError
from services.text.model import TextModel
from services.text.pinned import pinned_ids

log = logging.getLogger(__name__)

# A pin is a lease that every worker renews. A pin that is gone lets go by itself, and so does a store that moved.
PIN_AHEAD_S = 7 * 86_400.0
# Less than a day more: so a file's access time lies behind its modification time, and a system that keeps access
# times for reads too ("relatime") leaves it alone (`kvstore.filetimes`).
PIN_TTL_S = PIN_AHEAD_S + 43_200.0
SETTLED_NS = 2 * 10**9


class PinnedPrefix(NamedTuple):
    pin: Pin
    token_ids: list[int]
    refs: list[BlockRef]


class PinnedPrefixes:
    def __init__(self, root: Path, identity: Identity, store: KVStore, text: TextModel) -> None:
        self._book = PinBook(root)
        self._identity = identity
        self._store = store
        self._text = text
        self._stamp = 0
        self._refused: set[str] = set()
        self.prefixes: list[PinnedPrefix] = []
        self.shared = SharedPrefixes()

    def refresh(self) -> bool:
        """Reads the pins again if one has come or gone. False: nothing is new."""
        stamp = self._book.stamp()
        if stamp == self._stamp:
            return False
        try:
            pins = [pin for pin in self._book.pins() if pin.model == self._text.slug]
        except OSError as error:
            log.warning("cannot read the pins: %s; those known so far go on", error)
            return False
        # A clock that ticks slowly may give a second change the same time: what is new is read again a little later.
        self._stamp = stamp if stamp == 0 or time.time_ns() - stamp > SETTLED_NS else -1
        counting = [(pin, ids) for pin in pins if (ids := self._ids(pin)) is not None]
        self.shared = shared_prefixes(counting)
        self.prefixes = [
            PinnedPrefix(pin, ids, pin_refs(pin, ids, self._identity, self.shared)) for pin, ids in counting
        ]
        return True

    def keep(self, prefixes: list[PinnedPrefix]) -> list[PinnedPrefix]:
        """Renews the lease of their blocks. Returns those that lack some, which are to be computed."""
        until = time.time() + PIN_AHEAD_S
        kept = [self._store.renew(prefix.refs, PIN_TTL_S, used_at=until) for prefix in prefixes]
        return [prefix for prefix, count in zip(prefixes, kept, strict=True) if count < len(prefix.refs)]

    def _ids(self, pin: Pin) -> list[int] | None:
        """None for a pin that does not count here: its text is other tokens now than when it was pinned, or too few."""
        try:
            ids = pinned_ids(pin.kind, pin.text, self._text)
        except KvrelayError as error:
            self._refuse(pin, error.message)
            return None
        told = self._book.ids(pin, self._identity.tokenizer_hash)
        if told is None:
            self._tell(pin, ids)
        elif told != ids:
            self._refuse(pin, "its text comes out in other tokens than when it was pinned")
            return None
        if len(ids) < self._identity.block_tokens:
            self._refuse(pin, "it is shorter than a block")
            return None
        return ids

    def _tell(self, pin: Pin, ids: list[int]) -> None:
        try:
            self._book.add_ids(pin, with_hash(self._identity.tokenizer_hash, ids))
        except OSError as error:
            log.warning("cannot write the tokens of pin %s: %s", pin.id, error)

    def _refuse(self, pin: Pin, why: str) -> None:
        if pin.id not in self._refused:
            self._refused.add(pin.id)
            log.warning("pin %s does not count here: %s", pin.id, why)
