"""Weights of a GGUF file, read from where they lie: quantised blocks without a copy, other tensors one at a time."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kernels.quantised_weight import BLOCK_BYTES, BLOCK_VALUES, QuantisedWeight
from schemas.errors import SetupError
from services.models.gguf_file import read_gguf
from services.models.gguf_tensors import StoredTensor, tensors_of

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
    """`config` is the Hugging Face config made of the file's metadata. Tensors keep the file mapped while they live."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        gguf = read_gguf(path)
        self._tensors = tensors_of(gguf, config)
        try:
            with path.open("rb") as file:
                # Private and writable, because torch warns of memory that is not; nobody writes, so nothing is copied.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SetupError(f"cannot read {path}: {error}") from error
        if len(self._data) < max((stored.tensor.end for stored in self._tensors.values()), default=0):
            raise SetupError(f"{path} became shorter while it was read: leave a model's file alone while it is used")

    def __enter__(self) -> "GgufSource":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._data  # unmapped with the last tensor that shows it

    def read(self, name: str, *shape: int) -> Tensor:
        stored = self._find(name, shape)
        if stored.tensor.type in BLOCK_BYTES:
            return self._quantised(stored).dequantise().view(shape)
        # A copy: the file need not stay mapped for it, and may have it at any byte.
        values = self._bytes(stored).clone().view(_PLAIN[stored.tensor.type]).view(shape)
        order = _row_order(stored)
        return values if order is None else values[order]

    def read_quantised(self, name: str, *shape: int) -> QuantisedWeight:
        stored = self._find(name, shape)
        if stored.tensor.type not in BLOCK_BYTES:
            raise SetupError(
                f"{self._path}: tensor {name} is {stored.tensor.type}, not one of {', '.join(BLOCK_BYTES)}"
            )
        return self._quantised(stored)

    def formats(self) -> dict[str, str]:
        return {name: stored.tensor.type for name, stored in self._tensors.items()}

    def _quantised(self, stored: StoredTensor) -> QuantisedWeight:
        inputs = stored.tensor.shape[-1]
        row_bytes = inputs // BLOCK_VALUES * BLOCK_BYTES[stored.tensor.type]
        return QuantisedWeight(stored.tensor.type, self._bytes(stored).view(-1, row_bytes), _row_order(stored))

    def _bytes(self, stored: StoredTensor) -> Tensor:
        tensor = stored.tensor
        return torch.frombuffer(self._data, dtype=torch.uint8, offset=tensor.start, count=tensor.num_bytes)

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._tensors:
            raise SetupError(f"{self._path} has no tensor {name}: it is incomplete or of another architecture")
        stored = self._tensors[name]
        if stored.tensor.shape != shape:
            raise SetupError(
                f"{self._path}: tensor {name} is {list(stored.tensor.shape)}, the config implies {list(shape)}"
            )
        return stored


def _row_order(stored: StoredTensor) -> Tensor | None:
    """Which stored row is each of Hugging Face's: `[heads, D / 2, 2]` there, `[heads, 2, D / 2]` here."""
    if not stored.paired_heads:
        return None
    rows = torch.arange(stored.tensor.shape[0])
    return rows.view(stored.paired_heads, -1, 2).transpose(1, 2).reshape(-1)
