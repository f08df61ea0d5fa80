"""JSON grammars over a vocabulary: which tokens may come next. The only place that calls the `llguidance` library.

A matcher is a function of the tokens that it was told, so whoever continues a choice rebuilds it from their ids.
JSON is written in one way, without free whitespace: small models would go on with that for ever.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import llguidance
import numpy as np
import numpy.typing as npt

from schemas.errors import GrammarFailed, InvalidRequest
from schemas.response_format import not_followed
from services.text.grammar_source import Source
from services.text.narrowing import narrowed
from services.text.stack import DEEP, on_stack
from services.text.vocabulary import Vocabulary

Mask = npt.NDArray[np.uint32]
"""A bit an id, lowest first: `[ceil(V / 32)]`."""
Masks = npt.NDArray[np.uint32]
"""Several of them: `[n, ceil(V / 32)]`."""

Encode = Callable[[str], list[int]]

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FIRST_STEPS = 8
MAX_TEXTS, MAX_TEXT_LENGTH = 4096, 100  # kept with their tokens: a schema's names, and what stands between them
# Tokens that are allowed together: whole slices of the vocabulary at once. Strings of a limited length need short ones
# too: with the library's own, 10 and 30, a mask took 49 us on average where with these it takes 28.
BLANKS, IN_A_STRING = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]'
SLICES = (2, 4, 6, 8, 10, 15, 20, 30)
MAX_RENEWALS = 4  # each compiles again, which takes 3 ms on average and never 2 s


def _limits(step_lexer_fuel: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=20_000,
        max_lexer_states=20_000,  # of 1 to 2 kB
        max_grammar_size=100_000,
        verbose_errors=False,
    )


LIMITS = _limits(50_000)  # some 4 ms
# Of a lexer that starts anew in the middle of an answer. Not less than the others: what passes there passes here too,
# so that what other matchers have found out before decides nothing.
OWN_LIMITS = _limits(500_000)


class Compiler:
    """Of one vocabulary; made in 0.2 s. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        """`encode`: how the model's tokenizer would write a text; where a grammar leaves no choice, it is followed."""
        self._num_tokens = len(vocabulary.tokens)
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary, encode)),
            n_vocab=self._num_tokens,
            eos_token=vocabulary.eos_ids,
            slices=[BLANKS, *(f"{IN_A_STRING}{{1,{length}}}" for length in SLICES), f"{IN_A_STRING}+"],
        )

    def compile(self, source: Source) -> "Grammar":
        """Raises `InvalidRequest` that says why there is no grammar for it. Neither its time nor its memory is bounded,
        and it recurses over the schema: see `services.text.grammars`."""
        schema = json.dumps(narrowed(source.schema) | {"x-guidance": JSON_STYLE})
        before, after = json.dumps(source.before), json.dumps(source.after)
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: {before} json {after}\njson: %json {schema}")

        def make(limits: llguidance.LLParserLimits) -> llguidance.LLMatcher:
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
            if matcher.is_error():
                raise not_followed(_told(matcher.get_error()))
            return matcher

        return Grammar(make(LIMITS), make, self._num_tokens)

    def try_out(self, source: Source) -> None:
        """Compiles it and takes its first steps, since much of a grammar is built only then. Raises as `compile`."""
        matcher = self.compile(source).matcher(may_renew=False)
        try:
            for _ in range(FIRST_STEPS):
                token = _lowest(matcher.mask())
                if token in self._eos_ids:
                    return
                matcher.advance(token)
        except GrammarFailed as error:
            raise not_followed(error.message) from error


class Grammar:
    """Compiled, with a lexer that all its matchers share: what one has found out, the others need not.

    A limit that one of them meets stays for all of them, so each goes on with a grammar of its own then: how a choice
    ends must not depend on what else was asked of this process.
    """

    def __init__(
        self,
        fresh: llguidance.LLMatcher,
        make: Callable[[llguidance.LLParserLimits], llguidance.LLMatcher],
        num_tokens: int,
    ) -> None:
        self.is_spent = False  # a matcher had to go on without it: better compile anew
        self._fresh = fresh
        self._make = make
        self._num_tokens = num_tokens

    def matcher(self, *, may_renew: bool = True) -> "Matcher":
        """At the beginning of a text."""
        return Matcher(self._fresh.deep_copy(), self._own if may_renew else None, self._num_tokens)

    def _own(self) -> llguidance.LLMatcher:
        self.is_spent = True
        return on_stack(DEEP, partial(self._make, OWN_LIMITS))


class Matcher:
    """How far one choice has come. Not thread-safe."""

    def __init__(
        self, matcher: llguidance.LLMatcher, own: Callable[[], llguidance.LLMatcher] | None, num_tokens: int
    ) -> None:
        """`own`: another one at the beginning, that shares nothing; None: the limits of this one are the last word."""
        self._matcher = matcher
        self._own = own
        self._num_words = -(-num_tokens // 32)
        self._tokens: list[int] = []
        self._renewed_at: list[int] = []  # at which of them another matcher took over

    def advance(self, token: int) -> None:
        """`token` is the next one. What does not fit is told by the next `mask`."""
        self._tokens.append(token)
        self._matcher.consume_token(token)

    def mask(self) -> Mask:
        """Of the tokens that may come next. Raises `GrammarFailed`."""
        masks = self.nothing(1)
        self.fill(masks, ())
        mask: Mask = masks[0]
        return mask

    def nothing(self, count: int) -> Masks:
        """`count` masks that allow nothing."""
        return np.zeros((count, self._num_words), dtype=np.uint32)

    def fill(self, masks: Masks, draft: Sequence[int]) -> None:
        """`masks[0]` becomes what may come next, and each other one what may come behind a token more of `draft`.

        Behind what does not fit, or takes too long, nothing is allowed. Raises `GrammarFailed` where nothing may come
        next. Lets other threads run.
        """
        self._fill(masks, draft)
        if not masks[0].any() and self._renew():
            self._fill(masks, draft)
        if not masks[0].any():
            raise GrammarFailed(_told(self._matcher.get_error()), param="response_format")

    def _fill(self, masks: Masks, draft: Sequence[int]) -> None:
        matcher, at, step, num_taken = self._matcher, masks.ctypes.data, masks.strides[0], 0
        for ahead, mask in enumerate(masks):
            if ahead and not matcher.try_consume_tokens([draft[ahead - 1]]):
                break
            num_taken += ahead > 0
            matcher.unsafe_compute_mask_ptr(at + ahead * step, step)
            if matcher.is_error() or not mask.any():
                mask[:] = 0
                break
        if num_taken:
            matcher.rollback(num_taken)

    def _renew(self) -> bool:
        """Where it has met a limit, goes on with another that shares nothing. False where that is of no use."""
        here = len(self._tokens)
        if self._own is None or not self._matcher.is_error():
            return False
        if len(self._renewed_at) == MAX_RENEWALS or self._renewed_at[-1:] == [here]:
            return False
        self._renewed_at.append(here)
        self._matcher = self._own()
        self._matcher.consume_tokens(self._tokens)
        return True

    def forced(self) -> list[int]:
        """The next tokens, as far as it leaves no choice about them; none where it leaves one, or has met a limit."""
        return list(self._matcher.compute_ff_tokens())

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the next ones, the grammar allows, as far as it can tell without a mask."""
        return int(self._matcher.validate_tokens(list(tokens)))


def _lowest(mask: Mask) -> int:
    word = int(np.flatnonzero(mask)[0])
    bits = int(mask[word])
    return 32 * word + (bits & -bits).bit_length() - 1


class _Tokens:
    """What the library asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self._encode = encode
        # Where a grammar leaves no choice it asks for the same few texts again and again: 20 us each time.
        self._kept = lru_cache(MAX_TEXTS)(encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """Nothing where the tokenizer cannot write it: then the grammar goes by bytes alone."""
        try:
            text = text if isinstance(text, str) else text.decode()
            return self._kept(text) if len(text) <= MAX_TEXT_LENGTH else self._encode(text)
        except InvalidRequest:
            return []


_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_SOURCE = re.compile(r"\n +\d+ \| start: .*", re.DOTALL)


def _told(why: str) -> str:
    """The library's words without the place in a grammar that only we know, and what it prints of its state."""
    why = _SOURCE.sub("", _PLACE.sub("", why.partition("\n<")[0])).strip()[:500]
    return "no token of this model goes on" if why in ("", "NoExtensionBias") else why
