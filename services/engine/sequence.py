"""A sequence in a batch: its tokens, how many of them have K and V in its pages, and what to do with the next one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.engine import Outcome, Work
from services.engine.pages import PagePool
from services.engine.recheck import Recheck
from services.engine.sampler import Sampler


def _never() -> bool:
    return False


def _ignore(_: int) -> None:
    return None


@dataclass(eq=False, slots=True)
class Sequence:
    """`token_ids[:num_computed]` have K and V in `pages`; the rest is known but not computed yet.

    When the last known token is computed, one token is sampled for each of `samplers`, as number `index`, and
    `on_computed` is called with the outcome: it may append the token and so go on, or leave the batch.
    `on_block_full(i)` is called when block `i` has its last token computed. `is_paused` holds the sequence back
    for a pass. `recheck` compares those of its known tokens whose rows are computed here.
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

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed

    def work(self, pool: PagePool, max_rows: int) -> Work:
        """The next at most `max_rows` rows, with pages for them taken from the sequence's reservation."""
        end = self.num_computed + min(max_rows, self.num_missing)
        while len(self.pages) * pool.block_tokens < end:
            self.pages.append(pool.take())
        return Work(
            token_ids=self.token_ids[self.num_computed : end],
            start=self.num_computed,
            pages=self.pages[: -(-end // pool.block_tokens)],
            samplers=self.samplers if end == len(self.token_ids) else [],
            index=self.index,
            recheck=self.recheck,
        )

    def advance(self, num_rows: int, block_tokens: int) -> None:
        before = self.num_computed // block_tokens
        self.num_computed += num_rows
        for block in range(before, self.num_computed // block_tokens):
            self.on_block_full(block)
