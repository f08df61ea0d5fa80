"""Prefixes that the operator pinned: `<root>/pins/<id>.json`, and their ids, `<root>/pins/<id>-<tokenizer>.ids`.

A pin is a text; what it is in tokens depends on a tokenizer. Both are kept with their hash, and a pin counts only
while both fit. Knows nothing of who computes the blocks.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from kvstore import small_files
from kvstore.keys import BlockRef, Identity, chain_refs, token_hash
from kvstore.shared_prefix import SharedPrefixes
from kvstore.tier import SHARED_TENANT

FOLDER = "pins"
_PIN, _IDS = ".json", ".ids"

Kind = Literal["system", "prompt"]


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kind` system: `text` is a system message, pinned as its rendered turn; prompt: the beginning of raw prompts.

    `model` is a slug. A pin of tenant `_shared` is everybody's.
    """

    v: Literal[1] = 1
    kind: Kind
    model: str
    tenant: str
    salt: str = ""
    text: str
    text_hash: str
    created_at: float

    @property
    def id(self) -> str:
        """12 hex digits over what is pinned, for whom."""
        parts = (self.kind, self.model, self.tenant, self.salt, self.text)
        return blake3(msgspec.json.encode(parts)).hexdigest()[:12]

    @property
    def is_shared(self) -> bool:
        return self.tenant == SHARED_TENANT


class PinnedIds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens of a pin for one tokenizer."""

    tokenizer_hash: str
    token_hash: str
    token_ids: list[int]


def text_hash(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def new_pin(kind: Kind, model: str, tenant: str, salt: str, text: str, created_at: float) -> Pin:
    return Pin(
        kind=kind,
        model=model,
        tenant=tenant,
        salt=salt,
        text=text,
        text_hash=text_hash(text),
        created_at=created_at,
    )


def pinned_ids(tokenizer_hash: bytes, ids: list[int]) -> PinnedIds:
    return PinnedIds(tokenizer_hash=tokenizer_hash.hex(), token_hash=token_hash(ids).hex(), token_ids=ids)


class PinBook:
    """The pins of one store. Methods that write raise `OSError`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def stamp(self) -> int:
        """Changes when a pin comes or goes; 0 while there was none. One system call."""
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:
            return 0

    def add(self, pin: Pin, ids: PinnedIds) -> None:
        self.add_ids(pin, ids)
        small_files.write(self._folder / f"{pin.id}{_PIN}", msgspec.json.encode(pin))

    def add_ids(self, pin: Pin, ids: PinnedIds) -> None:
        small_files.write(self._ids_path(pin.id, ids.tokenizer_hash), msgspec.json.encode(ids))

    def remove(self, pin_id: str) -> bool:
        """False: there was none."""
        path = self._folder / f"{pin_id}{_PIN}"
        was_there = path.exists()
        path.unlink(missing_ok=True)
        for name in small_files.names(self._folder, _IDS):
            if name.partition("-")[0] == pin_id:
                (self._folder / f"{name}{_IDS}").unlink(missing_ok=True)
        return was_there

    def pins(self) -> list[Pin]:
        """Oldest first. Those whose text or file is not as it was written are left out: see `damaged`."""
        found = [pin for name in self._names() if (pin := self._read(name)) is not None]
        return sorted(found, key=lambda pin: (pin.created_at, pin.id))

    def damaged(self) -> list[str]:
        """Ids of pins that do not count, because they cannot be read or a hash does not fit."""
        return [name for name in self._names() if self._read(name) is None]

    def ids(self, pin: Pin, tokenizer_hash: bytes) -> list[int] | None:
        """Its tokens for that tokenizer; None if nobody has told them yet, or their hash does not fit."""
        with suppress(OSError, msgspec.DecodeError):
            data = small_files.read(self._ids_path(pin.id, tokenizer_hash.hex()))
            found = msgspec.json.decode(data or b"", type=PinnedIds)
            if token_hash(found.token_ids).hex() == found.token_hash and found.tokenizer_hash == tokenizer_hash.hex():
                return found.token_ids
        return None

    def shared(self, model: str, tokenizer_hash: bytes) -> SharedPrefixes:
        """What the shared pins of a model make public."""
        pins = [pin for pin in self.pins() if pin.is_shared and pin.model == model]
        return shared_prefixes((pin, ids) for pin in pins if (ids := self.ids(pin, tokenizer_hash)))

    def refs(self, model: str, identity: Identity) -> list[tuple[Pin, list[BlockRef]]]:
        """Each pin of a model with its full blocks, as a worker of this identity names them; none where nobody has
        told its tokens."""
        shared = self.shared(model, identity.tokenizer_hash)
        pins = [(pin, self.ids(pin, identity.tokenizer_hash)) for pin in self.pins() if pin.model == model]
        return [(pin, pin_refs(pin, ids or [], identity, shared)) for pin, ids in pins]

    def _names(self) -> list[str]:
        return small_files.names(self._folder, _PIN)

    def _read(self, name: str) -> Pin | None:
        with suppress(OSError, msgspec.DecodeError):
            data = small_files.read(self._folder / f"{name}{_PIN}")
            pin = msgspec.json.decode(data or b"", type=Pin)
            if pin.id == name and text_hash(pin.text) == pin.text_hash:
                return pin
        return None

    def _ids_path(self, pin_id: str, tokenizer_hash: str) -> Path:
        return self._folder / f"{pin_id}-{tokenizer_hash}{_IDS}"


def shared_prefixes(pins: Iterable[tuple[Pin, list[int]]]) -> SharedPrefixes:
    """Of pins with their tokens."""
    return SharedPrefixes(tuple(tuple(ids) for pin, ids in pins if pin.is_shared))


def pin_refs(pin: Pin, ids: list[int], identity: Identity, shared: SharedPrefixes) -> list[BlockRef]:
    """The full blocks of `ids`, as a request of the pin's tenant would name them beside the `shared` pins."""
    full = ids[: len(ids) - len(ids) % identity.block_tokens]
    return chain_refs(identity, pin.tenant, pin.salt, full, shared.num_blocks(full, identity.block_tokens))
