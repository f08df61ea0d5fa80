"""A model's tokenizer: the only place that calls the `tokenizers` library."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from schemas.errors import InvalidRequest, SetupError
from services.text.control_tokens import ControlTokens, GuardedText
from services.text.token_bytes import WORD_START, byte_level_bytes, is_byte_fallback, sentencepiece_bytes
from services.text.token_floor import TokenFloor


class Tokenizer:
    """Text to ids and back, exactly as `transformers` does with the same tokenizer.json, and never normalised by us.

    (A vocabulary may lack a few characters, as SmolLM2's lacks six of ASCII's control characters: it drops them.)
    *Control tokens* are the added tokens that the tokenizer marks special. Whether one is recognised in a text is
    the caller's choice; two backends differ in that alone, because the library keeps it as a state of the object.
    Thread-safe.
    """

    def __init__(self, source: str, eos_ids: Sequence[int] = ()) -> None:
        """`source` is the text of a tokenizer.json. Raises `SetupError` if it is none."""
        self._parsing = _parse(source)
        self._literal = _parse(source)
        self._literal.encode_special_tokens = True
        self.eos_ids = tuple(eos_ids)
        self.vocab_size: int = self._parsing.get_vocab_size(with_added_tokens=True)
        self.is_byte_level = isinstance(self._parsing.decoder, tokenizers.decoders.ByteLevel)
        self._to_bytes = byte_level_bytes if self.is_byte_level else sentencepiece_bytes
        added = self._parsing.get_added_tokens_decoder()
        special = {id_: token for id_, token in added.items() if token.special}
        self.control = ControlTokens({token.content: id_ for id_, token in special.items()})
        self.hidden_ids = self.control.id_set | frozenset(eos_ids)
        self._stand_ins, self._stood_for = self._add_stand_ins(list(special.values()))
        # A token that strips its surroundings covers any number of spaces.
        self._swallows_spaces = any(token.lstrip or token.rstrip for token in added.values())
        self._floor = self._token_floor()

    @classmethod
    def from_file(cls, path: Path, eos_ids: Sequence[int] = ()) -> "Tokenizer":
        try:
            return cls(path.read_text(encoding="utf-8"), eos_ids)
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"cannot read the tokenizer {path}: {error}") from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: recognise control tokens in `text`; otherwise they are plain text, as a user's should be.

        No start token is added. Raises `InvalidRequest` for text that is not Unicode (lone surrogates).
        """
        if special:
            return _encode(self._parsing, text)
        return self._checked(_encode(self._literal, text), num_controls=0)

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt, as `transformers`' tokenizer(text): control tokens recognised, its own start token added."""
        return _encode(self._parsing, text, add_special_tokens=True)

    def encode_guarded(self, guarded: GuardedText) -> list[int]:
        """A rendered template: control tokens are recognised, except where a guard character stands for the first
        character of one (see `ControlTokens.guard`): those become the plain text that they stand for.

        Each recognised one is swapped for a stand-in, an added token that nobody can type, so that one pass of the
        library sees the same seams as in harmless text. Raises `InvalidRequest`, as `encode`.
        """
        if not guarded.guards:
            return self.encode(guarded.text, special=True)
        marked, num_controls = self.control.replace(guarded.text, self._stand_ins)
        ids = [self._stood_for.get(id_, id_) for id_ in _encode(self._literal, guarded.unguarded(marked))]
        return self._checked(ids, num_controls)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Exactly `transformers`' decode without clean-up; broken UTF-8 becomes U+FFFD."""
        text: str = self._parsing.decode(ids, skip_special_tokens=skip_special)
        return text

    def token_bytes(self, id_: int) -> bytes:
        """What the token adds to a text; an id without a token adds nothing."""
        token = self._parsing.id_to_token(id_)
        return b"" if token is None else self._to_bytes(token)

    def is_byte_fallback(self, id_: int) -> bool:
        """Whether the token is one byte of a character that the (sentencepiece-like) vocabulary does not have."""
        token = None if self.is_byte_level else self._parsing.id_to_token(id_)
        return token is not None and is_byte_fallback(token)

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least; milliseconds for a megabyte.

        Raises `InvalidRequest` for text that is not Unicode.
        """
        _check_unicode(text)
        if self._parsing.normalizer is not None:
            text = self._parsing.normalizer.normalize_str(text)
        if self._swallows_spaces:
            text = "".join(text.split())
        return self._floor.of(text.encode() if self.is_byte_level else text.replace(" ", WORD_START))

    def _token_floor(self) -> TokenFloor:
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        if self.is_byte_level:
            return TokenFloor(byte_level_bytes(token) for token in vocabulary)
        return TokenFloor(token.replace(" ", WORD_START) for token in vocabulary)

    def _add_stand_ins(self, added: list[tokenizers.AddedToken]) -> tuple[dict[str, str], dict[int, int]]:
        """Adds one stand-in a control token to the literal backend; (control text -> stand-in, stand-in id -> id).

        They carry a secret of this process, so no text can contain one on purpose.
        """
        secret = secrets.token_hex(8)
        stand_ins = {token.content: f"\ufdef{secret}{n}\ufdef" for n, token in enumerate(added)}
        flags = {
            token.content: {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            for token in added
        }
        self._literal.add_tokens(
            [tokenizers.AddedToken(stand_in, special=False, **flags[text]) for text, stand_in in stand_ins.items()]
        )
        stood_for: dict[int, int] = {}
        for text, stand_in in stand_ins.items():
            id_ = self._literal.token_to_id(stand_in)
            assert id_ is not None  # added just above
            stood_for[id_] = self.control.ids[text]
        return stand_ins, stood_for

    def _checked(self, ids: list[int], num_controls: int) -> list[int]:
        """A vocabulary may spell a control token with ordinary merges; then origin cannot be told from the ids."""
        if sum(id_ in self.control.id_set for id_ in ids) != num_controls:
            raise InvalidRequest("the text spells a control token of this model: it cannot be taken as plain text")
        return ids


def _parse(source: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise SetupError(f"not a usable tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    _check_unicode(text)
    ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text contains a lone surrogate (character {error.start}), which is not text"
        ) from None
