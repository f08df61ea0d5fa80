"""Reads the head of a GGUF file: metadata and tensor table, every length checked before it is believed.

Own reader: the `gguf` package takes 6 to 9 s to walk this vocabulary, and a damaged file ends it in a stack trace.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError

MAGIC = b"GGUF"
MAX_METADATA_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_STRING_BYTES = 16 << 20
MAX_DIMENSIONS = 4

# GGML type number -> (name, values in a block, bytes of a block)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(msgspec.Struct, frozen=True):
    """`shape` as in torch, slowest dimension first; `start` and `num_bytes` within the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class GgufFile(msgspec.Struct, frozen=True):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """By its first bytes. Raises `SetupError` for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from error


def read_gguf(path: Path) -> GgufFile:
    """Raises `SetupError` for a file that cannot be read, is cut off or damaged, or holds unsupported tensors."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).gguf()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise SetupError(f"cannot read {path}: {error}") from error


def read_floats(gguf: GgufFile, name: str) -> list[float]:
    """The values of a small float32 tensor. Raises `SetupError` for one of another type."""
    tensor = gguf.tensors[name]
    if tensor.type != "F32":
        raise SetupError(f"{gguf.path}: tensor {name} must be F32, it is {tensor.type}")
    try:
        with gguf.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
    except (OSError, struct.error) as error:
        raise SetupError(f"cannot read {gguf.path}: {error}") from error


class _Cursor:
    """Walks the mapped file from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def gguf(self) -> GgufFile:
        if self._take(len(MAGIC)) != MAGIC:
            raise SetupError(f"{self._path} is not a GGUF file")
        version, num_tensors, num_keys = self._unpack("<IQQ")
        if version not in (2, 3):
            raise SetupError(f"{self._path} is GGUF version {version}: versions 2 and 3 (little-endian) are supported")
        self._check(num_tensors <= MAX_TENSORS and num_keys <= MAX_METADATA_KEYS)
        metadata = {self._string(): self._value() for _ in range(num_keys)}
        table = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        self._check(isinstance(alignment, int) and 0 < alignment <= 1 << 20)
        data_start = math.ceil(self._at / alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, data_start + offset) for name, shape, kind, offset in table}
        self._check(len(tensors) == len(table))
        return GgufFile(self._path, metadata, tensors)

    def _value(self, kind: int | None = None) -> Any:
        kind = self._unpack("<I")[0] if kind is None else kind
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        self._check(kind in _SCALARS)
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self) -> list[Any]:
        kind, count = self._unpack("<IQ")
        self._check(count <= len(self._data) - self._at)  # an item has a byte at least
        if kind in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[kind]}"))
        self._check(kind == _STRING)
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        self._check(size <= MAX_STRING_BYTES)
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise self._damaged() from None

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("<I")
        self._check(1 <= num_dimensions <= MAX_DIMENSIONS)
        shape = self._unpack(f"<{num_dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            supported = ", ".join(sorted(known for known, _, _ in TENSOR_TYPES.values()))
            raise SetupError(
                f"{self._path}: tensor {name} has the type {_type_name(kind)}; supported are {supported}: "
                "take a file with one of those"
            )
        type_name, block_values, block_bytes = TENSOR_TYPES[kind]
        self._check(shape[-1] % block_values == 0 and all(shape))
        num_bytes = math.prod(shape) // block_values * block_bytes
        if start + num_bytes > len(self._data):
            raise SetupError(
                f"{self._path} is cut off: tensor {name} ends at byte {start + num_bytes}, "
                f"the file has {len(self._data)}: get it again"
            )
        return GgufTensor(name, shape, type_name, start, num_bytes)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        self._check(size <= len(self._data) - self._at)
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def _check(self, holds: bool) -> None:
        if not holds:
            raise self._damaged()

    def _damaged(self) -> SetupError:
        return SetupError(f"{self._path} is cut off or damaged (near byte {self._at}): get it again")


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
