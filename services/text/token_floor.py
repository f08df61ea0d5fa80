"""A sound lower bound on the number of tokens of a text, in milliseconds: refuses over-long prompts untokenised."""

from collections import Counter
from collections.abc import Iterable


class TokenFloor:
    """Every token covers its own units (bytes, or characters), so a unit that occurs in tokens of at most `n` units
    accounts for at least 1/n of a token. The sum over a text is never more than its number of tokens.

    Sharper than "longest token": runs of spaces have tokens of 64 and more, letters rarely more than 20.
    """

    def __init__(self, tokens: Iterable[bytes | str]) -> None:
        self._share: dict[int | str, float] = {}
        for token in sorted(tokens, key=len, reverse=True):
            units: set[int | str] = set(token)
            for unit in units.difference(self._share):
                self._share[unit] = 1.0 / len(token)

    def of(self, text: bytes | str) -> int:
        """Units outside the vocabulary count nothing: an unknown run may be one token."""
        counts: Counter[int | str] = Counter(text)
        total = sum(count * self._share.get(unit, 0.0) for unit, count in counts.items())
        return int(total * (1 - 1e-9))  # a rounding error must not refuse a text that just fits
