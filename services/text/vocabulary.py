"""A model's tokens as bytes: what a grammar needs of a tokenizer, in a form that another process can be sent."""

import msgspec

from services.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens[i]` is what token i adds to a text; ids without a token add nothing. `special_ids` are no text."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> "Vocabulary":
        return cls(
            tokens=[tokenizer.token_bytes(id_) for id_ in range(size)],
            special_ids=sorted(tokenizer.hidden_ids),
            eos_ids=list(eos_ids),
        )
