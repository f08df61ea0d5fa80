"""Small blocks to store: their identity, references and payloads."""

import msgspec
import numpy as np

from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity, block_refs, root_of
from schemas.blob import ElementType, Quantisation

BLOCK_TOKENS = 16
IDENTITY = Identity(
    fingerprint=b"modelfpr",
    tokenizer_hash=b"tokenizr",
    arithmetic=b"arithmet",
    dtype=ElementType.BFLOAT16,
    block_tokens=BLOCK_TOKENS,
)
GEOMETRY = Geometry(2, 3, 16, ElementType.BFLOAT16)
TTL_S = 1000.0


def quantised(quantisation: Quantisation) -> tuple[Identity, Geometry]:
    """The same blocks in another form."""
    identity = msgspec.structs.replace(IDENTITY, quantisation=quantisation)
    return identity, msgspec.structs.replace(GEOMETRY, quantisation=quantisation)


def refs_of(token_ids: object, tenant: str = "default", identity: Identity = IDENTITY) -> list[BlockRef]:
    return block_refs(root_of(identity, tenant), token_ids, identity.block_tokens)  # type: ignore[arg-type]


def chain(num_blocks: int, first_id: int = 0) -> list[BlockRef]:
    return refs_of(range(first_id, first_id + num_blocks * BLOCK_TOKENS))


def kv_like(geometry: Geometry, tokens: int, seed: int = 0) -> memoryview:
    """A payload with a mean for each channel and noise around it, which is why byte planes of real KV compress."""
    rng = np.random.default_rng(seed)
    rows = 2 * geometry.layers * geometry.heads
    mean = rng.normal(0, 2, (rows, 1, geometry.head_dim))
    values = (mean + 0.1 * rng.normal(size=(rows, tokens, geometry.head_dim))).astype("<f4")
    if geometry.dtype is ElementType.FLOAT16:
        return memoryview(values.astype("<f2").tobytes())
    if geometry.dtype is ElementType.BFLOAT16:
        return memoryview((values.view("<u4") >> 16).astype("<u2").tobytes())
    return memoryview(values.tobytes())


def payload_of(ref: BlockRef, geometry: Geometry = GEOMETRY) -> memoryview:
    """The same bytes whenever the same block is asked for."""
    return kv_like(geometry, ref.num_tokens, seed=int.from_bytes(ref.key[:8], "little"))


def empty(ref: BlockRef, geometry: Geometry = GEOMETRY) -> memoryview:
    return memoryview(bytearray(geometry.page_bytes(ref.num_tokens)))
