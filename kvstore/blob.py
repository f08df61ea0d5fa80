"""Pages into sealed blobs and back: the digest over header and stored payload, and all checks on the way back."""

from collections.abc import Sequence

from blake3 import blake3

from kvstore.codec import CODECS, PLAIN, BlockCodec
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity
from kvstore.quantise import quantiser_for
from schemas.blob import (
    DIGEST_BYTES,
    DIGESTED_BYTES,
    HEADER_BYTES,
    BlobHeader,
    Codec,
    DamagedBlob,
    MismatchedBlob,
    parse_header,
)
from schemas.errors import SetupError


def open_blob(head: memoryview, stored: memoryview) -> BlobHeader:
    """The header of a blob whose every byte is as it was written. Raises `DamagedBlob` otherwise.

    The digest comes first: no field is believed, and nothing decompressed, before it fits.
    """
    if _digest(head[:DIGESTED_BYTES], [stored]) != head[DIGESTED_BYTES:HEADER_BYTES]:
        raise DamagedBlob("the digest does not fit the bytes")
    header = parse_header(head)
    if header.stored_bytes != len(stored):
        raise DamagedBlob(f"the header promises {header.stored_bytes} bytes, {len(stored)} are there")
    return header


class BlobFormat:
    """How the blocks of one identity are written, and which blobs are believed to be one of them. Thread-safe.

    Raises `SetupError` when identity and geometry contradict each other.
    """

    def __init__(self, identity: Identity, geometry: Geometry, codec: BlockCodec) -> None:
        if identity.dtype is not geometry.dtype:
            raise SetupError(f"keys are for {identity.dtype.name} blocks, their geometry says {geometry.dtype.name}")
        if identity.quantisation is not geometry.quantisation:
            raise SetupError(
                f"keys are for {identity.quantisation.name} blocks, their geometry says {geometry.quantisation.name}"
            )
        geometry.check_block_tokens(identity.block_tokens)
        self._identity = identity
        self._geometry = geometry
        self._codec = codec
        self._quantiser = quantiser_for(geometry)

    def page_bytes(self, ref: BlockRef) -> int:
        return self._geometry.page_bytes(ref.num_tokens)

    @property
    def compresses(self) -> bool:
        return self._codec is not PLAIN

    def seal(self, ref: BlockRef, page: memoryview, *, plain: bool = False) -> Sequence[memoryview]:
        """The blob in parts; valid until this thread seals or opens another. `plain`: without the codec.

        Raises `NotFinitePage` for a page that is to be quantised and holds NaN or infinity.
        """
        payload = page if self._quantiser is None else self._quantiser.pack(page, ref.num_tokens)
        return self.seal_payload(ref, payload, plain=plain)

    def seal_payload(self, ref: BlockRef, payload: memoryview, *, plain: bool = False) -> Sequence[memoryview]:
        """The same of a page that is quantised already."""
        codec = PLAIN if plain else self._codec
        stored = codec.encode(payload, self._geometry, ref.num_tokens)
        if stored is None:
            codec, stored = PLAIN, [payload]
        fields = self._header(ref, codec.id, sum(map(len, stored))).pack()
        return [memoryview(fields + _digest(fields, stored)), *stored]

    def open(self, ref: BlockRef, head: memoryview, buffer: memoryview, stored_bytes: int) -> None:
        """In place: the first `stored_bytes` of `buffer` become the page of the block `ref`, which fills it.

        Raises `DamagedBlob`, or `MismatchedBlob` when it is another block; then `buffer` holds anything.
        """
        codec = self.check(ref, head, buffer[:stored_bytes])
        payload = buffer[: self._geometry.payload_bytes(ref.num_tokens)]
        CODECS[codec].decode(payload, stored_bytes, self._geometry, ref.num_tokens)
        if self._quantiser is not None:
            self._quantiser.unpack(buffer, ref.num_tokens)

    def check(self, ref: BlockRef, head: memoryview, stored: memoryview) -> Codec:
        """Returns how the block `ref` is stored, if that is what it is: raises `DamagedBlob` or `MismatchedBlob`."""
        header = open_blob(head, stored)
        if header.key != ref.key:
            raise DamagedBlob(f"it is the block {header.key.hex()[:16]} under another's name")
        if wrong := self._differences(header, ref):
            raise MismatchedBlob(f"it is not ours: {wrong}")
        return header.codec

    def describes(self, ref: BlockRef, head: memoryview, blob_bytes: int) -> bool:
        """Whether a blob of that size with this header would be the block `ref` if it is sound. Reads no payload."""
        try:
            header = parse_header(head)
        except DamagedBlob:
            return False
        return blob_bytes == HEADER_BYTES + header.stored_bytes and not self._differences(header, ref)

    def _differences(self, header: BlobHeader, ref: BlockRef) -> str:
        """In which fields a header is not that of `ref`, for people to read; a hit is believed when there is none."""
        if header.codec not in CODECS:
            return f"codec is {header.codec.name}, which this version cannot read"
        expected = self._header(ref, header.codec, header.stored_bytes)
        if header == expected:
            return ""
        names = [name for name in header.__struct_fields__ if getattr(header, name) != getattr(expected, name)]
        return ", ".join(f"{name} is {_show(header, name)}, not {_show(expected, name)}" for name in names)

    def _header(self, ref: BlockRef, codec: Codec, stored_bytes: int) -> BlobHeader:
        identity, geometry = self._identity, self._geometry
        return BlobHeader(
            codec=codec,
            quantisation=identity.quantisation,
            dtype=identity.dtype,
            tokenizer_hash=identity.tokenizer_hash,
            fingerprint=identity.fingerprint,
            arithmetic=identity.arithmetic,
            layers=geometry.layers,
            heads=geometry.heads,
            head_dim=geometry.head_dim,
            tokens=ref.num_tokens,
            position=ref.start,
            stored_bytes=stored_bytes,
            token_hash=ref.token_hash,
            key=ref.key,
        )


def _digest(fields: bytes | memoryview, stored: Sequence[memoryview]) -> bytes:
    hasher = blake3(fields)
    for part in stored:
        hasher.update(part)
    return hasher.digest(DIGEST_BYTES)


def _show(header: BlobHeader, name: str) -> str:
    value = getattr(header, name)
    return value.hex() if isinstance(value, bytes) else str(value)
