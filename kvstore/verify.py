"""Whether a stored blob is what its writer wrote, told without knowing any model."""

from collections.abc import Iterable

from blake3 import blake3

from kvstore.tier import BlobName
from schemas.blob import DIGEST_BYTES, DIGESTED_BYTES, HEADER_BYTES, DamagedBlob, parse_header


def damage_of(name: BlobName, pieces: Iterable[bytes]) -> str | None:
    """What is wrong with the blob under `name`, in words; "" if nothing is, None if there is no blob.

    The digest covers the header, which holds the key, so a sound blob under another's name is found as well. Needs
    no more memory than a piece and a header.
    """
    head, hasher, stored_bytes, is_there = b"", blake3(), 0, False
    for piece in pieces:
        is_there = True
        lacking = HEADER_BYTES - len(head)
        head += piece[:lacking]
        if lacking and len(head) == HEADER_BYTES:
            hasher.update(head[:DIGESTED_BYTES])
        hasher.update(piece[lacking:])
        stored_bytes += len(piece[lacking:])
    if len(head) < HEADER_BYTES:
        return f"{len(head)} bytes are no blob" if is_there else None
    if hasher.digest(DIGEST_BYTES) != head[DIGESTED_BYTES:]:
        return "the digest does not fit the bytes"
    return _contradiction(name, head, stored_bytes)


def _contradiction(name: BlobName, head: bytes, stored_bytes: int) -> str:
    try:
        header = parse_header(head)
    except DamagedBlob as error:
        return error.message
    if header.stored_bytes != stored_bytes:
        return f"the header promises {header.stored_bytes} bytes, {stored_bytes} are there"
    if header.key != name.key:
        return f"it is the block {header.key.hex()[:16]} under another's name"
    return ""
