"""The bytes that one token of a vocabulary stands for."""

import re

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "\u2581"  # how sentencepiece-like vocabularies spell a space


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


# Characters to Latin-1 ones of the byte's number; those of Latin-1 outside the alphabet to one that cannot be encoded.
_TO_LATIN_1 = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for c, b in _byte_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """A token of a byte-level vocabulary; an added token that is not spelled in the alphabet is its own text."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def is_byte_fallback(token: str) -> bool:
    return _BYTE_FALLBACK.fullmatch(token) is not None


def sentencepiece_bytes(token: str) -> bytes:
    """A token of a sentencepiece-like vocabulary, with its leading space."""
    if found := _BYTE_FALLBACK.fullmatch(token):
        return bytes([int(found.group(1), 16)])
    return token.replace(WORD_START, " ").encode()
