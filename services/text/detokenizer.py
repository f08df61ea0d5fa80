"""Token ids to text, token by token: never half a character, never a part of a stop string.

The state is a function of the ids pushed so far, so whoever takes over a job rebuilds it by pushing them again.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.text.stops import StopScanner
from services.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNDECIDED_TOKENS = 8  # as many tokens may a window end in U+FFFD before that is taken for the text itself


class _Decoder(Protocol):
    """The text that one more token settles, and at the end what was never settled."""

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """For vocabularies whose tokens are bytes: the text is the bytes, decoded; broken UTF-8 becomes U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For every other vocabulary: decodes a short window of ids behind one *anchor* token whose text is known.

    The anchor keeps what depends on position (a stripped leading space) away from the new text. Tokens that are
    single bytes are decided as a run: one invalid byte turns all of the run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._anchor_text = ""
        self._undecided = 0

    def push(self, token_id: int) -> str:
        if not self._tokenizer.token_bytes(token_id):
            return ""  # an id without a token is no anchor
        self._window.append(token_id)
        if self._tokenizer.is_byte_fallback(token_id):
            return ""
        text = self._tokenizer.decode(self._window, skip_special=False)
        self._undecided = self._undecided + 1 if text.endswith(_REPLACEMENT) else 0
        if 0 < self._undecided <= _MAX_UNDECIDED_TOKENS:
            return ""
        released = text[len(self._anchor_text) :]
        self._window = [token_id]
        self._anchor_text = self._tokenizer.decode(self._window, skip_special=False)
        return released

    def finish(self) -> str:
        return self._tokenizer.decode(self._window, skip_special=False)[len(self._anchor_text) :]


class Detokenizer:
    """One choice's text. What `push` and `finish` return, joined, is `tokenizer.decode` of all ids without control
    and end tokens, cut before the first stop string.

    The first stop string is looked for after every token: at the first token that completes any, the match that
    starts earliest. A character that is still unfinished at the end is one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._hidden_ids = tokenizer.hidden_ids
        self._decoder: _Decoder = _ByteLevelDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
        self._scanner = StopScanner(stops) if stops else None
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text released by this token, the stop string that it completed). After a stop nothing more comes."""
        if self._stopped or token_id in self._hidden_ids:
            return "", None
        return self._release(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back, after the last token; "" after a stop."""
        if self._stopped:
            return ""
        text, stop = self._release(self._decoder.finish())
        return text if stop else text + self._held

    def _release(self, text: str) -> tuple[str, str | None]:
        if self._scanner is None or not text:
            return text, None
        match = self._scanner.scan(text)
        pending = self._held + text
        if match is not None:
            offset, stop = match
            self._stopped = True
            return pending[: len(self._held) + offset], stop
        keep = len(pending) - self._scanner.held
        self._held = pending[keep:]
        return pending[:keep], None
