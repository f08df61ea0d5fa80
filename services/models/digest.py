"""Hashes of files and settings: what makes two models the same."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.models.files import Stamp

DIGEST_BYTES = 16
# Up to here a file is hashed at every start (0.15 s for 100 MB), above only when its size, times or inode changed.
ALWAYS_HASHED_BYTES = 512 << 20
_CHUNK_BYTES = 8 << 20


class _Known(msgspec.Struct, frozen=True):
    stamp: Stamp
    digest: str


_index_decoder = msgspec.json.Decoder(dict[str, _Known])


class FileDigests:
    """Digests of files by content, with an index on disk for the large ones.

    The index believes that a file whose path, size, modification time (ns) and inode are unchanged is unchanged.
    Delete `index` to have everything hashed again; a damaged or outdated one only costs time.
    """

    def __init__(self, index: Path) -> None:
        self._index = index

    def of(self, path: Path) -> bytes:
        """Raises `SetupError` for a file that cannot be read."""
        try:
            stamp = Stamp.of(path)
            if stamp.size <= ALWAYS_HASHED_BYTES:
                return _hash_file(path)
            key = str(path.resolve())
            known = self._load().get(key)
            if known is None or known.stamp != stamp:
                known = _Known(stamp, _hash_file(path).hex())
                self._store(key, known)
            return bytes.fromhex(known.digest)
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error}") from error

    def _load(self) -> dict[str, _Known]:
        try:
            return _index_decoder.decode(self._index.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}

    def _store(self, key: str, known: _Known) -> None:
        self._index.parent.mkdir(parents=True, exist_ok=True)
        beside = self._index.with_name(f"{self._index.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(self._load() | {key: known}))
        beside.replace(self._index)


def digest_of(parts: Iterable[bytes], purpose: str, size: int = DIGEST_BYTES) -> bytes:
    """One hash over parts of any length, each counted, so that no two lists of parts run together."""
    hasher = hashlib.blake2b(digest_size=size, person=purpose.encode()[:16])
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def canonical_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _hash_file(path: Path) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvrelay-file")
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.digest()
