"""The safetensors container: checked cheaply before it is trusted, and written as a stream, a tensor at a time.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian length, JSON head, data).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import SetupError

MAX_HEAD_BYTES = 100_000_000  # as the reference implementation
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


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
            head = json.loads(file.read(head_bytes))
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if not isinstance(head, dict):
        raise SetupError(f"{path} is damaged: its head is no JSON object")
    head.pop("__metadata__", None)
    ends = [_checked_end(path, name, entry) for name, entry in head.items()]
    if 8 + head_bytes + max(ends, default=0) != size:
        raise SetupError(f"{path} is cut off or damaged: it should have {8 + head_bytes + max(ends, default=0)} bytes")
    return frozenset(head)


def _checked_end(path: Path, name: str, entry: Any) -> int:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        wanted = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    except (TypeError, KeyError, ValueError) as error:
        raise SetupError(f"{path} is damaged: the entry of {name} is malformed") from error
    if dtype not in ITEM_BYTES:
        raise SetupError(f"{path}: tensor {name} has the type {dtype}; supported are {', '.join(ITEM_BYTES)}")
    if not 0 <= start <= end or end - start != wanted:
        raise SetupError(f"{path} is damaged: tensor {name} has {end - start} bytes instead of {wanted}")
    return int(end)


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], values: Iterable[memoryview]) -> None:
    """`values`: one contiguous float32 buffer a tensor, in the order of `shapes`; taken one at a time.

    On disk when it returns.
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        head[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(head).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for buffer in values:
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
