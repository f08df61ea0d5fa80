"""A chunk that says nothing but text is the same bytes each time, around the text: they are made once an answer.

Streams are nearly all such chunks, and to spell each anew was a tenth of what they cost.
"""

import secrets
from collections.abc import Callable

import msgspec

_encoder = msgspec.json.Encoder()
_MARK = secrets.token_hex(16)  # no client can have put it into what surrounds a text


class PlainChunk:
    """`spelled` makes the chunk of a text."""

    def __init__(self, spelled: Callable[[str], msgspec.Struct]) -> None:
        self._before, _, self._after = _encoder.encode(spelled(_MARK)).partition(_encoder.encode(_MARK))

    def of(self, text: str) -> bytes:
        return self._before + _encoder.encode(text) + self._after
