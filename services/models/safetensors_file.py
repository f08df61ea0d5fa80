"""The safetensors container, checked cheaply before it is trusted.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian length, JSON head, data).
"""

import math
import os
from pathlib import Path
from typing import Annotated

import msgspec

from schemas.errors import SetupError

MAX_HEAD_BYTES = 100_000_000  # as the reference implementation
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


_head_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


def tensor_names(path: Path) -> frozenset[str]:
    """Names in the file, after checking that head and data are whole and every dtype is one that kvrelay computes in.

    Raises `SetupError` otherwise.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or head_bytes > min(MAX_HEAD_BYTES, size - 8):
                raise SetupError(f"{path} is cut off or damaged: get it again")
            head = _head_decoder.decode(file.read(head_bytes))
        head.pop("__metadata__", None)
        entries = {name: _entry_decoder.decode(raw) for name, raw in head.items()}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    for name, entry in entries.items():
        _check_entry(path, name, entry)
    wanted = 8 + head_bytes + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if wanted != size:
        raise SetupError(f"{path} is cut off or damaged: it has {size} bytes instead of {wanted}: get it again")
    return frozenset(entries)


def _check_entry(path: Path, name: str, entry: _Entry) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise SetupError(f"{path}: tensor {name} has the type {entry.dtype}; supported are {', '.join(ITEM_BYTES)}")
    start, end = entry.data_offsets
    if start < 0 or end - start != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
        raise SetupError(f"{path} is damaged: the bytes of tensor {name} do not fit its shape: get it again")
