"""Pinning texts: what is pinned, and how much of it the store has."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.identities import known
from kvstore.keys import BlockRef, Identity
from kvstore.pins import Kind, Pin, PinBook, new_pin, pinned_ids
from kvstore.tier import SHARED_TENANT, BlobName, Life
from schemas.errors import InvalidRequest, JobNotFound, SetupError
from services.kv.view import StoreView
from services.kv.who import Who
from services.settings import Settings
from services.text.pinned import pinned_ids as tokens_of

__all__ = ["Pin", "PinReport", "Wanted", "make_pin", "report", "unpin"]


class Wanted(NamedTuple):
    kind: Kind
    text: str
    tenant: str
    salt: str
    shared: bool


class PinReport(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks`: full blocks of the text under the newest identity of its model that has used the store, of which
    `stored` are there. Both are 0 before any worker has."""

    id: str
    kind: str
    model: str
    tenant: str
    salt: str
    text: str
    text_hash: str
    token_hash: str | None
    tokens: int
    blocks: int
    stored: int
    created_at: float


def make_pin(settings: Settings, who: Who, wanted: Wanted) -> Pin:
    """The same again changes nothing. Raises `InvalidRequest` for a text that fills no block, `SetupError` if the
    store cannot be written."""
    ids = tokens_of(wanted.kind, wanted.text, who.text)
    if len(ids) < settings.kv.block_tokens:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens, and only whole blocks of kv.block_tokens = {settings.kv.block_tokens} "
            "can be kept: there is nothing to pin"
        )
    book = PinBook(_root(settings))
    tenant = SHARED_TENANT if wanted.shared else wanted.tenant
    pin = new_pin(wanted.kind, who.files.slug, tenant, wanted.salt, wanted.text, time.time())
    earlier = {pin.id: pin for pin in book.pins()}
    pin = earlier.get(pin.id, pin)
    try:
        book.add(pin, pinned_ids(who.files.tokenizer_hash, ids))
    except OSError as error:
        raise SetupError(f"cannot write the pin to {_root(settings)}: {error}") from error
    return pin


def report(view: StoreView, pin: Pin, tokenizer_hash: bytes = b"") -> PinReport:
    """`tokenizer_hash`: whose tokens are told before any worker has used the store."""
    identities = [k for k in known(view.root) if k.record.model == pin.model]
    refs = _refs(view, pin, identities[0].identity) if identities else []
    tokenizers = [*(k.identity.tokenizer_hash for k in identities), tokenizer_hash]
    ids = next((ids for one in tokenizers if (ids := view.pins.ids(pin, one)) is not None), [])
    return PinReport(
        id=pin.id,
        kind=pin.kind,
        model=pin.model,
        tenant=pin.tenant,
        salt=pin.salt,
        text=pin.text,
        text_hash=pin.text_hash,
        token_hash=pinned_ids(b"", ids).token_hash if ids else None,
        tokens=len(ids),
        blocks=len(refs),
        stored=sum(any(tier.find(ref.name) for tier in view.tiers) for ref in refs),
        created_at=pin.created_at,
    )


def unpin(view: StoreView, pin_ids: list[str], ttl_s: float) -> None:
    """Removes pins; their blocks live on for `ttl_s`, as any other does. Raises `JobNotFound`, and nothing is done, if
    one of them is none."""
    there = {*(pin.id for pin in view.pins.pins()), *view.pins.damaged()}
    unknown = [pin_id for pin_id in pin_ids if pin_id not in there]
    if unknown:
        raise JobNotFound(f"there is no pin {', '.join(unknown)}: `kvrelay kv pins` lists them")
    before = view.pinned()
    for pin_id in pin_ids:
        view.pins.remove(pin_id)
    _release(view, before.keys() - view.pinned().keys(), ttl_s)


def _release(view: StoreView, names: Iterable[BlobName], ttl_s: float) -> None:
    """A worker that renews them in this very moment delays that by a day."""
    now = view.clock()
    for name in names:
        for tier in view.tiers:
            tier.set_life(name, Life(now, now + ttl_s))


def _refs(view: StoreView, pin: Pin, identity: Identity) -> list[BlockRef]:
    return {p.id: refs for p, refs in view.pins.refs(pin.model, identity)}.get(pin.id, [])


def _root(settings: Settings) -> Path:
    return Path(settings.kv.data_dir) / "kv"
