"""Continuous batching: plan a pass, run it, apply its outcomes, for as long as there are sequences.

One class serves both stages: a prompt is a sequence with many missing tokens, a generating one misses one a pass.
"""

import asyncio
from collections.abc import Callable, Iterable

from services.bus.progress import Progress
from services.engine.engine import Engine, Work
from services.engine.sequence import Sequence


def _nothing() -> None:
    return None


class Batch:
    """All methods belong to the event loop's thread.

    `chunk_tokens` bounds the rows of one sequence in a pass (on a grid of absolute positions), `token_budget`
    those of all together.
    """

    def __init__(self, engine: Engine, *, chunk_tokens: int, token_budget: int) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._token_budget = token_budget
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
        """Rows that the next pass would take if there were no budget."""
        return sum(min(sequence.num_missing, self._chunk_tokens) for sequence in self._sequences)

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
            if sequence not in self._sequences:
                continue
            sequence.advance(len(work.token_ids), self._engine.pool.block_tokens)
            if sequence.num_missing == 0:
                sequence.on_computed(outcome)
        self.after_pass()

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def _plan(self) -> tuple[list[Sequence], list[Work]]:
        """First those that need one row: who catches up on many never uses up the budget of who generates."""
        members, works, budget = [], [], self._token_budget
        for sequence in sorted(self._sequences, key=lambda sequence: sequence.num_missing > 1):
            if budget == 0:
                break
            if sequence.num_missing == 0 or sequence.is_paused():
                continue
            to_grid = self._chunk_tokens - sequence.num_computed % self._chunk_tokens
            work = sequence.work(self._engine.pool, min(to_grid, budget))
            budget -= len(work.token_ids)
            members.append(sequence)
            works.append(work)
        return members, works
