"""The names of KV blocks: a chain of BLAKE3 hashes over everything that a block's bytes depend on.

A key is the same in every process and on every machine: nothing here depends on hash seeds, on the machine's byte
order or on the type that token ids come in.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.tier import SHARED_TENANT, BlobName
from schemas.blob import (
    FORMAT_VERSION,
    ID_BYTES,
    MAX_BLOCK_TOKENS,
    MIN_BLOCK_TOKENS,
    TOKEN_HASH_BYTES,
    ElementType,
    Quantisation,
)
from schemas.errors import InvalidRequest, SetupError

TokenIds = Sequence[int] | NDArray[Any]  # or whatever numpy.asarray understands, a CPU tensor for one

_MAX_TOKEN_ID = 2**32 - 1


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the blocks of two deployments interchangeable, apart from tenant and salt.

    `arithmetic` names the floating-point recipe (with the instruction-set class where bits depend on it).
    """

    fingerprint: bytes
    tokenizer_hash: bytes
    arithmetic: bytes
    dtype: ElementType
    block_tokens: int
    quantisation: Quantisation = Quantisation.NONE
    format: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("fingerprint", "tokenizer_hash", "arithmetic"):
            if len(getattr(self, name)) != ID_BYTES:
                raise SetupError(f"{name} must have {ID_BYTES} bytes, got {len(getattr(self, name))}")
        if not MIN_BLOCK_TOKENS <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise SetupError(
                f"kv.block_tokens must be from {MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS}, got {self.block_tokens}"
            )


class BlockRef(msgspec.Struct, frozen=True):
    """Which block is meant, and what its blob must say about itself.

    `token_hash` covers all ids from 0 to the block's end, `start` is the position of the block's first token.
    """

    tenant: str
    key: bytes
    token_hash: bytes
    start: int
    num_tokens: int

    @property
    def name(self) -> BlobName:
        return BlobName(self.tenant, self.key)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def root_of(identity: Identity, tenant: str, salt: str = "") -> BlobName:
    """The parent of a first block, which is no block itself.

    `tenant` comes from the authenticated caller, `salt` can only narrow sharing.
    """
    return BlobName(tenant, blake3(_canonical(identity, tenant, salt)).digest())


def block_key(parent: bytes, ids: bytes) -> bytes:
    """`ids`: the block's token ids as little-endian uint32."""
    return blake3(parent + ids).digest()


def block_refs(root: BlobName, token_ids: TokenIds, block_tokens: int) -> list[BlockRef]:
    """The chain of blocks that `token_ids` fill, the last one perhaps partly.

    Raises `InvalidRequest` for anything but a flat list of integers from 0 to 2**32 - 1.
    """
    return _chain(root, _uint32_le(token_ids), 0, block_tokens)


def chain_refs(
    identity: Identity, tenant: str, salt: str, token_ids: TokenIds, shared_blocks: int = 0
) -> list[BlockRef]:
    """The chain of a tenant's tokens, of which the first `shared_blocks` blocks are everybody's.

    What follows them is keyed from the tenant's own root and the last shared key: tenants share the public prefix
    and nothing behind it. Raises as `block_refs`.
    """
    data, root = _uint32_le(token_ids), root_of(identity, tenant, salt)
    num_bytes = 4 * identity.block_tokens * shared_blocks
    if not num_bytes:
        return _chain(root, data, 0, identity.block_tokens)
    shared = _chain(root_of(identity, SHARED_TENANT), data[:num_bytes], 0, identity.block_tokens)
    fork = BlobName(tenant, blake3(root.key + shared[-1].key).digest()) if shared else root
    return shared + _chain(fork, data, num_bytes, identity.block_tokens)


def token_hash(token_ids: TokenIds) -> bytes:
    """What a `BlockRef` says of all ids up to its end."""
    return blake3(_uint32_le(token_ids)).digest(TOKEN_HASH_BYTES)


def _chain(root: BlobName, data: bytes, begin: int, block_tokens: int) -> list[BlockRef]:
    """`data`: all ids from 0 on as little-endian uint32; the chain starts at byte `begin` of it."""
    refs = []
    parent, so_far = root.key, blake3(data[:begin])
    for offset in range(begin, len(data), 4 * block_tokens):
        ids = data[offset : offset + 4 * block_tokens]
        so_far.update(ids)
        parent = block_key(parent, ids)
        refs.append(BlockRef(root.tenant, parent, so_far.digest(TOKEN_HASH_BYTES), offset // 4, len(ids) // 4))
    return refs


def check_key_constant() -> None:
    """Raises `SetupError` if this process derives other keys than every other one. Called once at start-up."""
    identity = Identity(
        fingerprint=b"modelfpr",
        tokenizer_hash=b"tokenizr",
        arithmetic=b"arithmet",
        dtype=ElementType.BFLOAT16,
        block_tokens=16,
    )
    last = block_refs(root_of(identity, "default", "salt"), range(20), identity.block_tokens)[-1]
    if last.key.hex() != KEY_CONSTANT or last.token_hash.hex() != TOKEN_HASH_CONSTANT:
        raise SetupError(
            f"this process derives other block keys than it should ({last.key.hex()} instead of {KEY_CONSTANT}): its "
            "blake3 or numpy is broken, or the key format was changed without a new format version"
        )


KEY_CONSTANT = "f232dc781cacdd4089dbf9e248a06a76bdaa4c6b14e6f8186bdbe43b0a946624"
TOKEN_HASH_CONSTANT = "2696bbd8ca1a5ebc7b7e836120a6f5c1"


def _canonical(identity: Identity, tenant: str, salt: str) -> bytes:
    """Names and values in a fixed order, each after its length, so that no two identities are written alike."""
    fields: list[tuple[str, bytes]] = [
        ("format", _uint32(identity.format)),
        ("fingerprint", identity.fingerprint),
        ("tokenizer_hash", identity.tokenizer_hash),
        ("dtype", _uint32(identity.dtype)),
        ("quantisation", _uint32(identity.quantisation)),
        ("arithmetic", identity.arithmetic),
        ("block_tokens", _uint32(identity.block_tokens)),
        ("tenant", tenant.encode()),
        ("salt", salt.encode()),
    ]
    return b"".join(_uint32(len(part)) + part for name, value in fields for part in (name.encode(), value))


def _uint32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _uint32_le(token_ids: TokenIds) -> bytes:
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids must be a flat list of integers, got {ids.dtype} {ids.shape}", param="prompt")
    if ids.min() < 0 or ids.max() > _MAX_TOKEN_ID:
        raise InvalidRequest(f"token ids must be from 0 to {_MAX_TOKEN_ID}", param="prompt")
    return ids.astype("<u4").tobytes()
