"""What there is to say of one stored block."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvstore.pins import Pin
from kvstore.tier import BlobName
from services.kv.view import Held, StoreView

SORTS: dict[str, Callable[["BlockRow"], Any]] = {
    "used": lambda row: -row.used_at,
    "size": lambda row: -row.bytes,
    "expires": lambda row: row.expires_at,
    "tenant": lambda row: (row.tenant, row.model, row.start),
}


class BlockRow(msgspec.Struct, frozen=True, kw_only=True):
    """One blob in one tier. Times are unix seconds; `pin` is the id of the pin that keeps it. What a header that
    cannot be read would say is None."""

    key: str
    tenant: str
    tier: str
    model: str
    bytes: int
    used_at: float
    expires_at: float
    expired: bool
    pin: str | None
    start: int = 0
    tokens: int = 0
    codec: str | None = None
    dtype: str | None = None
    quantisation: str | None = None
    payload_bytes: int | None = None
    header: dict[str, Any] | None = None


def row_of(view: StoreView, held: Held, pinned: dict[BlobName, Pin], *, whole: bool = False) -> BlockRow:
    """`whole`: with every field of the header."""
    entry, header = held.entry, held.entry.header
    pin = pinned.get(entry.name)
    fields: dict[str, Any] = {}
    if header is not None:
        fields = {
            "start": header.position,
            "tokens": header.tokens,
            "codec": header.codec.name.lower(),
            "dtype": header.dtype.name.lower(),
            "quantisation": header.quantisation.name.lower(),
            "payload_bytes": header.payload_bytes,
        }
        if whole:
            fields["header"] = {name: _plain(getattr(header, name)) for name in header.__struct_fields__}
    return BlockRow(
        key=entry.name.key.hex(),
        tenant=entry.name.tenant,
        tier=held.tier.name,
        model="unreadable" if header is None else view.model_of(header),
        bytes=entry.size,
        used_at=entry.life.used_at,
        expires_at=entry.life.expires_at,
        expired=entry.is_expired(view.clock()),
        pin=None if pin is None else pin.id,
        **fields,
    )


def rows(view: StoreView, found: Iterable[Held], sort: str) -> list[BlockRow]:
    """`sort`: one of `SORTS`."""
    pinned = view.pinned()
    return sorted((row_of(view, held, pinned) for held in found), key=SORTS[sort])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    name = getattr(value, "name", None)
    return value if name is None else name.lower()
