"""A sequence in a batch: its tokens, how many of them have K and V in its pages, and what to do with the next one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.engine.drafter import Drafter
from services.engine.engine import Outcome, Work
from services.engine.pages import PagePool
from services.engine.recheck import Recheck
from services.engine.sampler import Sampler


def _never() -> bool:
    return False


def _ignore(_: int) -> None:
    return None


class Guess(NamedTuple):
    """Of the next tokens. `chances[k]`: that the first k + 1 of `tokens` come true."""

    tokens: list[int]
    chances: list[float]


@dataclass(eq=False, slots=True)
class Sequence:
    """`token_ids[:num_computed]` have K and V in `pages`; the rest is known but not computed yet.

    When the last known token is computed, one token is sampled for each of `samplers`, as number `index`, and
    `on_computed` is called with the outcome: it may append the token and so go on, or leave the batch.
    `on_block_full(i)` is called when block `i` has its last token computed. `is_paused` holds the sequence back
    for a pass; one that `gives_way` is computed while no other one catches up. `recheck` compares those of its known
    tokens whose rows are computed here.
    `drafter` guesses what comes next, for a sequence of one sampler that will have at most `max_tokens` in all. What
    was guessed right is told as if each token had had a pass of its own.
    """

    token_ids: list[int]
    pages: list[int]
    num_computed: int
    on_computed: Callable[[Outcome], None]
    samplers: list[Sampler] = field(default_factory=list)
    index: int = 0
    on_block_full: Callable[[int], None] = _ignore
    is_paused: Callable[[], bool] = _never
    recheck: Recheck | None = None
    drafter: Drafter | None = None
    max_tokens: int = 0
    gives_way: bool = False

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_held(self) -> bool:
        """To a grammar, which may leave no choice now and then."""
        return all(sampler.matcher is not None for sampler in self.samplers)

    @property
    def max_draft(self) -> int:
        """So many tokens may be guessed beside the next one. None while several rows are missing."""
        if self.drafter is None or self.num_missing != 1:
            return 0
        return max(0, self.max_tokens - len(self.token_ids) - 1)

    def guess(self, count: int) -> Guess:
        """At most `count` guesses, of `max_draft`: where a grammar leaves no choice they are certain."""
        if self.drafter is None or count == 0:
            return Guess([], [])
        (sampler,) = self.samplers
        forced = sampler.forced()[:count]
        if forced:
            return Guess(forced, [1.0] * len(forced))
        chances = self.drafter.chances(count)
        draft = self.drafter.draft(len(chances)) if chances else []
        possible = sampler.num_possible(draft) if draft else 0
        return Guess(draft[:possible], chances[:possible])

    def work(self, pool: PagePool, max_rows: int, draft: list[int]) -> Work:
        """The next at most `max_rows` rows, with pages for them taken from the sequence's reservation.

        `draft`: at most `max_draft` tokens that may come next, whose rows are computed beside.
        """
        end = self.num_computed + min(max_rows, self.num_missing)
        num_pages = -(-(end + len(draft)) // pool.block_tokens)
        while len(self.pages) < num_pages:
            self.pages.append(pool.take())
        return Work(
            token_ids=self.token_ids[self.num_computed : end],
            start=self.num_computed,
            pages=self.pages[:num_pages],
            samplers=self.samplers if end == len(self.token_ids) else [],
            index=self.index,
            recheck=self.recheck,
            draft=draft,
        )

    def advance(self, num_rows: int, block_tokens: int) -> None:
        before = self.num_computed // block_tokens
        self.num_computed += num_rows
        for block in range(before, self.num_computed // block_tokens):
            self.on_block_full(block)
