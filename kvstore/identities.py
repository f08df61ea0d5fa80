"""Who has used a store: the identity of every worker that opened it, `<root>/identities/<id>.json`.

With them an operator's tool derives the keys of any prompt, for any of them, without loading a model.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from kvstore import small_files
from kvstore.keys import Identity
from schemas.blob import ElementType, Quantisation
from schemas.errors import SetupError

FOLDER = "identities"
_SUFFIX = ".json"


class IdentityRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is the slug; ids are hexadecimal. The file's modification time is when a worker last opened the store."""

    v: Literal[1] = 1
    model: str
    build: str
    arithmetic_name: str
    fingerprint: str
    tokenizer_hash: str
    arithmetic: str
    dtype: str
    quantisation: str
    block_tokens: int
    format: int

    @property
    def identity(self) -> Identity:
        """Raises `SetupError` or `ValueError` for fields that no worker of this version wrote."""
        return Identity(
            fingerprint=bytes.fromhex(self.fingerprint),
            tokenizer_hash=bytes.fromhex(self.tokenizer_hash),
            arithmetic=bytes.fromhex(self.arithmetic),
            dtype=ElementType.named(self.dtype),
            quantisation=_quantisation(self.quantisation),
            block_tokens=self.block_tokens,
            format=self.format,
        )


class KnownIdentity(msgspec.Struct, frozen=True):
    record: IdentityRecord
    identity: Identity
    last_seen: float


def record_of(identity: Identity, model: str, build: str, arithmetic_name: str) -> IdentityRecord:
    return IdentityRecord(
        model=model,
        build=build,
        arithmetic_name=arithmetic_name,
        fingerprint=identity.fingerprint.hex(),
        tokenizer_hash=identity.tokenizer_hash.hex(),
        arithmetic=identity.arithmetic.hex(),
        dtype=identity.dtype.name.lower(),
        quantisation=identity.quantisation.name.lower(),
        block_tokens=identity.block_tokens,
        format=identity.format,
    )


def remember(root: Path, record: IdentityRecord) -> None:
    """Raises `OSError`. The same record again only moves its time."""
    data = msgspec.json.encode(record)
    path = root / FOLDER / f"{blake3(data).hexdigest()[:16]}{_SUFFIX}"
    if small_files.read(path) == data:
        os.utime(path)
    else:
        small_files.write(path, data)


def known(root: Path) -> list[KnownIdentity]:
    """The one that was seen last comes first. What cannot be read (of a newer version, say) is left out."""
    found = []
    for name in small_files.names(root / FOLDER, _SUFFIX):
        path = root / FOLDER / f"{name}{_SUFFIX}"
        with suppress(OSError, msgspec.DecodeError, SetupError, ValueError):
            record = msgspec.json.decode(small_files.read(path) or b"", type=IdentityRecord)
            found.append(KnownIdentity(record, record.identity, path.stat().st_mtime))
    return sorted(found, key=lambda known: -known.last_seen)


def _quantisation(name: str) -> Quantisation:
    try:
        return Quantisation[name.upper()]
    except KeyError:
        raise SetupError(f"unknown quantisation {name!r}") from None
