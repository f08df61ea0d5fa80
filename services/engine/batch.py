"""Continuous batching: plan a pass, run it, apply its outcomes, for as long as there are sequences.

One class serves both stages: a prompt is a sequence with many missing tokens, a generating one misses one a pass.
"""

import asyncio
import math
from collections.abc import Callable, Iterable

from services.bus.progress import Progress
from services.engine.engine import Engine, Outcome, Work
from services.engine.sequence import Sequence
from services.engine.speculation import MARGIN, NO_MARGIN, share_out

# Of those that give way. Beside a busy neighbour, whose cores it has not, a worker computes a chunk in twice the time.
PASSES_A_CHUNK = 4


def _nothing() -> None:
    return None


class Batch:
    """All methods belong to the event loop's thread.

    `chunk_tokens` bounds the rows of one sequence in a pass (on a grid of absolute positions), `token_budget`
    those of all together. Beside a sequence that generates, those that catch up take no more rows in all than are
    computed in `slice_s`, one at least. Those that give way wait between two passes for all others that catch up, and
    have a part of a chunk a pass together, which is what somebody who comes waits for.
    At most `max_draft` guesses a sequence are computed beside its next token.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chunk_tokens: int,
        token_budget: int,
        slice_s: float = math.inf,
        max_draft: int = 0,
    ) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._token_budget = token_budget
        self._slice_s = slice_s
        self._max_draft = max_draft
        self._rows_that_give_way = max(engine.pool.block_tokens, chunk_tokens // PASSES_A_CHUNK)
        self._sequences: list[Sequence] = []
        self._in_pass: list[Sequence] = []
        self._pinned: list[int] = []  # pages of sequences that left during the pass
        self.progress = Progress()
        self.after_pass: Callable[[], None] = _nothing
        self._changed = asyncio.Event()
        self._pass_over = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_missing(self) -> int:
        """Rows that the next pass would take if there were no budget, and nobody gave way."""
        return sum(self._next_rows(sequence) for sequence in self._sequences if not sequence.gives_way)

    @property
    def num_giving_way(self) -> int:
        """The same of those that give way."""
        return sum(self._next_rows(sequence) for sequence in self._sequences if sequence.gives_way)

    def join(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._changed.set()

    def leave(self, sequence: Sequence) -> None:
        """Takes `sequence` out and releases its pages. What a pass still writes to stays held until it is over, on
        its own account: the caller may give back his promise at once."""
        self._remove(sequence)
        if sequence in self._in_pass:
            for page in sequence.pages:
                self._engine.pool.pin(page)
            self._pinned += sequence.pages
        self._engine.pool.release(sequence.pages)
        sequence.pages = []

    async def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Takes `sequences` out, their pages still held by them; returns when no pass writes to them any more."""
        for sequence in sequences:
            self._remove(sequence)
        if self._in_pass:
            await self._pass_over.wait()  # the next pass is not theirs

    def wake(self) -> None:
        """A paused sequence may go on."""
        self._changed.set()

    async def run(self) -> None:
        """Runs passes until cancelled."""
        while True:
            members, works = self._plan()
            if not works:
                self._changed.clear()
                self.progress.rest()
                if not self._sequences:
                    self._engine.pool.check_integrity()
                await self._changed.wait()
                continue
            await self._pass(members, works)

    async def _pass(self, members: list[Sequence], works: list[Work]) -> None:
        self._in_pass = members
        self._pass_over.clear()
        self.progress.begin()
        try:
            outcomes = await self._engine.run(works)
        finally:
            self._in_pass = []
            self._pass_over.set()
            pinned, self._pinned = self._pinned, []
            for page in pinned:
                self._engine.pool.unpin(page)
        self.progress.step()
        for sequence, work, outcome in zip(members, works, outcomes, strict=True):
            self._apply(sequence, work, outcome)
        self.after_pass()

    def _apply(self, sequence: Sequence, work: Work, outcome: Outcome) -> None:
        """What is not finite was not computed: its pages get no name, and are not stored."""
        if sequence not in self._sequences:
            return
        if not isinstance(outcome, list):
            sequence.on_computed(outcome)
            return
        block_tokens = self._engine.pool.block_tokens
        sequence.advance(len(work.token_ids), block_tokens)
        if sequence.num_missing:
            return
        sequence.on_computed(outcome[:1] if work.draft else outcome)
        for sampled in outcome[1:] if work.draft else ():
            if sequence not in self._sequences:
                return
            sequence.advance(1, block_tokens)
            sequence.on_computed([sampled])

    def _next_rows(self, sequence: Sequence) -> int:
        return min(sequence.num_missing, self._chunk_tokens)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def _plan(self) -> tuple[list[Sequence], list[Work]]:
        """First those that need one row: who catches up on many never uses up the budget of who generates."""
        ready = [sequence for sequence in self._sequences if sequence.num_missing and not sequence.is_paused()]
        generating = [sequence for sequence in ready if sequence.num_missing == 1][: self._token_budget]
        catching_up = [sequence for sequence in ready if sequence.num_missing > 1]
        pool, budget = self._engine.pool, self._token_budget - len(generating)
        pressing = [sequence for sequence in catching_up if not sequence.gives_way]
        if pressing:
            catching_up = pressing
        elif catching_up:
            budget = min(budget, self._rows_that_give_way)
        works = [
            sequence.work(pool, 1, draft)
            for sequence, draft in zip(generating, self._drafts(generating, budget, catching_up), strict=True)
        ]
        members = list(generating)
        if generating:
            budget = min(budget, self._rows_beside())
        for sequence in catching_up:
            if budget == 0:
                break
            to_grid = self._chunk_tokens - sequence.num_computed % self._chunk_tokens
            work = sequence.work(pool, min(to_grid, budget), [])
            budget -= len(work.token_ids)
            members.append(sequence)
            works.append(work)
        return members, works

    def _drafts(self, generating: list[Sequence], budget: int, catching_up: list[Sequence]) -> list[list[int]]:
        """The guesses that are computed for each; none while somebody catches up, whose rows are certain."""
        limits = [min(self._max_draft, budget, sequence.max_draft) for sequence in generating]
        if catching_up or not any(limits):
            return [[] for _ in generating]
        guesses = [sequence.guess(limit) for sequence, limit in zip(generating, limits, strict=True)]
        chances = [guess.chances for guess in guesses]
        certain = NO_MARGIN if all(sequence.is_held for sequence in generating) else MARGIN
        num, cost = len(generating), self._engine.step_cost
        counts = share_out(chances, num, num, cost, budget, certain=certain)
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def _rows_beside(self) -> int:
        """Of those that catch up."""
        cost = self._engine.step_cost
        if not cost.is_known or math.isinf(self._slice_s):
            return self._token_budget
        return max(1, int(self._slice_s / cost.row_s))
