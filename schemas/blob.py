"""The 128-byte header of a stored KV block: little-endian, every field at a fixed offset.

    0  magic `KVRB`        4  version, codec, quantisation, element type (one byte each)
    8  tokenizer hash     16  model fingerprint            24  arithmetic id
   32  layers, kv heads, head dim, tokens (uint16 each)    40  position of the first token (uint32)
   44  stored payload bytes (uint32)                       48  hash of all token ids from 0 to the block's end
   64  the block's key    96  BLAKE3 of header[0:96] + stored payload

Before the codec the payload is layer -> (K, V) -> kv head -> token -> dim, without padding; quantised, the float32
scales [head, token] follow each [head, token, dim] of values. This module knows the fields and their limits;
`kvstore.blob` knows the digest.
"""

import enum
import struct
from typing import TypeVar

import msgspec

from schemas.errors import Internal, SetupError

MAGIC = b"KVRB"
FORMAT_VERSION = 1
HEADER_BYTES = 128
DIGESTED_BYTES = 96  # the part of the header that the digest covers
DIGEST_BYTES = 32
ID_BYTES = 8
TOKEN_HASH_BYTES = 16
KEY_BYTES = 32
SCALE_BYTES = 4

MIN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 1024
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_PAYLOAD_BYTES = 2**32 - 1

E = TypeVar("E", bound=enum.IntEnum)
_FIELDS = struct.Struct("<4s4B8s8s8s4H2I16s32s")
assert _FIELDS.size == DIGESTED_BYTES


class DamagedBlob(Internal):
    """Bytes that no writer of ours stored under this name. To the reader of a block the same as a miss."""


class MismatchedBlob(Internal):
    """A sound blob under the right name that is not the block asked for: of another model, of other tokens."""


class Codec(enum.IntEnum):
    """How a payload is stored; 1 and 2 split it into byte planes first."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class Quantisation(enum.IntEnum):
    """Whole numbers from -`levels` to `levels` times a float32 scale for each token and head, K and V alike.

    INT4 packs two into a byte, the even dim in the low nibble.
    """

    NONE = 0
    INT8 = 1
    INT4 = 2

    @property
    def levels(self) -> int:
        return (0, 127, 7)[self]

    def vector_bytes(self, head_dim: int, dtype: "ElementType") -> int:
        """Payload of one token in one head: `head_dim` values, and their scale."""
        if self is Quantisation.NONE:
            return head_dim * dtype.item_bytes
        return SCALE_BYTES + (head_dim if self is Quantisation.INT8 else head_dim // 2)


class ElementType(enum.IntEnum):
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def item_bytes(self) -> int:
        return 4 if self is ElementType.FLOAT32 else 2

    @classmethod
    def named(cls, name: str) -> "ElementType":
        """`bfloat16` -> BFLOAT16. Raises `SetupError` for a name it does not know."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(item.name.lower() for item in cls)
            raise SetupError(f"KV blocks cannot hold {name!r}, only {known}") from None


class BlobHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes 0 to 96 of a blob. `position` is that of the block's first token, `tokens` how many it holds."""

    codec: Codec
    quantisation: Quantisation
    dtype: ElementType
    tokenizer_hash: bytes
    fingerprint: bytes
    arithmetic: bytes
    layers: int
    heads: int
    head_dim: int
    tokens: int
    position: int
    stored_bytes: int
    token_hash: bytes
    key: bytes

    @property
    def payload_bytes(self) -> int:
        """Size of the payload before the codec."""
        vectors = 2 * self.layers * self.heads * self.tokens
        return vectors * self.quantisation.vector_bytes(self.head_dim, self.dtype)

    def pack(self) -> bytes:
        """The 96 bytes that the digest covers."""
        return _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            self.codec,
            self.quantisation,
            self.dtype,
            self.tokenizer_hash,
            self.fingerprint,
            self.arithmetic,
            self.layers,
            self.heads,
            self.head_dim,
            self.tokens,
            self.position,
            self.stored_bytes,
            self.token_hash,
            self.key,
        )


def parse_header(data: bytes | bytearray | memoryview) -> BlobHeader:
    """The header at the start of `data`. Raises `DamagedBlob` when a field is outside its limits.

    Nothing is allocated from what the fields claim. The digest is not looked at.
    """
    if len(data) < HEADER_BYTES:
        raise DamagedBlob(f"{len(data)} bytes are no blob: a header alone has {HEADER_BYTES}")
    magic, version, codec, quantisation, dtype, *rest = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise DamagedBlob(f"magic is {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise DamagedBlob(f"format version is {version}, not {FORMAT_VERSION}")
    tokenizer_hash, fingerprint, arithmetic, layers, heads, head_dim, tokens, position, stored, token_hash, key = rest
    header = BlobHeader(
        codec=_known(Codec, codec),
        quantisation=_known(Quantisation, quantisation),
        dtype=_known(ElementType, dtype),
        tokenizer_hash=tokenizer_hash,
        fingerprint=fingerprint,
        arithmetic=arithmetic,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        tokens=tokens,
        position=position,
        stored_bytes=stored,
        token_hash=token_hash,
        key=key,
    )
    _check_limits(header)
    return header


def _known(kind: type[E], value: int) -> E:
    try:
        return kind(value)
    except ValueError:
        raise DamagedBlob(f"{kind.__name__} is {value}, which nobody knows") from None


def _check_limits(header: BlobHeader) -> None:
    for name, most in (
        ("layers", MAX_LAYERS),
        ("heads", MAX_HEADS),
        ("head_dim", MAX_HEAD_DIM),
        ("tokens", MAX_BLOCK_TOKENS),
        ("stored_bytes", min(header.payload_bytes, MAX_PAYLOAD_BYTES)),
    ):
        value = getattr(header, name)
        if not 1 <= value <= most:
            raise DamagedBlob(f"{name} is {value}, the limits are 1 and {most}")
    if header.quantisation is Quantisation.INT4 and header.head_dim % 2:
        raise DamagedBlob(f"head_dim is {header.head_dim}: int4 has two values in a byte")
    if header.position + header.tokens > 2**32:
        raise DamagedBlob(f"position {header.position} is past the last that a token can have")
