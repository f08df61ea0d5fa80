"""Batches as clients order them, and take their order back."""

import re

import msgspec

from schemas.batch import ENDED, Batch
from schemas.errors import InvalidRequest
from services.batch.shelf import Shelf, new_batch_id

MAX_WINDOW_S = 30 * 86_400

_WINDOW = re.compile(r"(\d{1,7})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def new_batch(file: str, endpoint: str, window: str, now: float, metadata: dict[str, object] | None = None) -> Batch:
    """Raises `InvalidRequest` for a window that is none."""
    found = _WINDOW.fullmatch(window)
    window_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise InvalidRequest("completion_window must be like 24h, at most 30d", param="completion_window")
    return Batch(
        id=new_batch_id(),
        endpoint=endpoint,
        input_file_id=file,
        completion_window=window,
        status="validating",
        created_at=int(now),
        expires_at=int(now) + window_s,
        metadata=metadata,
    )


async def cancel_batch(shelf: Shelf, name: str, now: float) -> Batch:
    while True:
        sequence, record = await shelf.batch(name)
        if record.batch.status in ENDED or record.batch.status == "cancelling":
            return record.batch
        batch = msgspec.structs.replace(record.batch, status="cancelling", cancelling_at=int(now))
        if await shelf.put_batch(msgspec.structs.replace(record, batch=batch), sequence) is not None:
            return batch
