"""Guesses how a sequence goes on: where its last tokens stood before, it went on in some way, and may again.

Guesses cost rows and change no token (`services.engine.engine`). They are compared with what comes also when nobody
asks for them, so that how often they come true is known for nothing. Knows nothing of models or passes.
"""

from collections.abc import Sequence

NGRAMS = (3, 2)  # tokens that must have stood there before, the longer the better
_ID_BITS = 21
_MAX_RUN = 5  # tokens in a row that came true, beyond which the next is no more likely
_FIRST_CHANCES = (0.2, 0.35, 0.55, 0.75, 0.85, 0.9)  # after so many in a row
_FIRST_TRIES = 4.0  # what these count for
_MEMORY = 0.95


class Drafter:
    """Of one sequence. `tokens` are its own, ids below 2**21, and grow; what is new is read when a guess is asked for.

    Constant work for each token.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._seen = len(tokens)
        self._after: list[dict[int, int]] = [_index(tokens, n) for n in NGRAMS]  # n-gram -> where it went on, lately
        self._hits = [_FIRST_TRIES * chance for chance in _FIRST_CHANCES]
        self._tries = [_FIRST_TRIES] * len(_FIRST_CHANCES)
        self._at: int | None = None  # of the token that is thought to be next
        self._run = 0
        self._look_up()

    def chances(self, count: int) -> list[float]:
        """That the first of up to `count` guesses comes true, the first two, and so on. Empty: there is no guess."""
        self._catch_up()
        chances: list[float] = []
        if self._at is not None:
            chance = 1.0
            for ahead in range(count):
                run = min(self._run + ahead, _MAX_RUN)
                chance *= self._hits[run] / self._tries[run]
                chances.append(chance)
        return chances

    def draft(self, count: int) -> list[int]:
        """`count` guesses, or none. A guess may go on behind the known tokens with the guesses themselves."""
        self._catch_up()
        if self._at is None:
            return []
        period = len(self._tokens) - self._at
        known = list(self._tokens[self._at : self._at + count])
        while len(known) < count:
            known.append(known[len(known) - period])
        return known

    def _catch_up(self) -> None:
        while self._seen < len(self._tokens):
            self._note(self._tokens[self._seen])

    def _note(self, token: int) -> None:
        """The next token."""
        if self._at is not None:
            is_hit = self._tokens[self._at] == token
            run = min(self._run, _MAX_RUN)
            self._hits[run] = _MEMORY * self._hits[run] + is_hit
            self._tries[run] = _MEMORY * self._tries[run] + 1
            self._at, self._run = (self._at + 1, self._run + 1) if is_hit else (None, 0)
        for n, after in zip(NGRAMS, self._after, strict=True):
            if self._seen >= n:
                after[_code(self._tokens[self._seen - n : self._seen])] = self._seen
        self._seen += 1
        if self._at is None:
            self._look_up()

    def _look_up(self) -> None:
        for longer, (n, after) in enumerate(zip(NGRAMS[::-1], self._after[::-1], strict=True)):
            if self._seen >= n and (at := after.get(_code(self._tokens[self._seen - n : self._seen]))) is not None:
                self._at, self._run = at, longer


def _code(ngram: Sequence[int]) -> int:
    code = 0
    for token in ngram:
        code = code << _ID_BITS | token
    return code


def _index(tokens: Sequence[int], n: int) -> dict[int, int]:
    """Of each n-gram that something follows, where that is the last time."""
    codes = [0] * max(0, len(tokens) - n)
    for ahead in range(n):
        codes = [code << _ID_BITS | token for code, token in zip(codes, tokens[ahead:], strict=False)]
    return dict(zip(codes, range(n, len(tokens)), strict=True))
