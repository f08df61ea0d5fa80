"""What chunk, budget and number of sequences suit a model on this machine, measured with the scheduler's own loop.

Prompts and answers are measured apart, as workers of one stage run them: `chunk_tokens` and `token_budget` shape the
passes of prompts, `max_sequences` the steps of answers. A gap is the time from one pass to the next: what an answer
waits for its next token, and a prompt for its turn.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from schemas.job import Sampling
from services.bench.engine import load_model
from services.bench.percentiles import percentile
from services.engine.batch import Batch
from services.engine.engine import Engine, Outcome
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.engine.sequence import Sequence as Running
from services.settings import Settings

CHUNKS = (64, 128, 256, 512)
CHUNKS_A_PASS = (1, 2, 4)
SEQUENCES = (4, 8, 16, 32)
NEAR_BEST = 0.97

NUM_PROMPTS, PROMPT_TOKENS = 4, 512
CTX_TOKENS, NUM_STEPS, WARM_UP_STEPS = 512, 40, 3
GREEDY = Sampling(temperature=0.0)


class Candidate(NamedTuple):
    """One setting of one stage: prompts have a chunk and a budget, answers a number of sequences."""

    chunk_tokens: int = 0
    token_budget: int = 0
    max_sequences: int = 0

    @property
    def is_of_prompts(self) -> bool:
        return self.max_sequences == 0

    def values(self) -> dict[str, int]:
        """By key, those that it sets."""
        return {f"scheduler.{name}": value for name, value in self._asdict().items() if value}


class Measured(NamedTuple):
    """`jitter_ms`: how much longer the gap of one in a hundred is than the usual one."""

    candidate: Candidate
    tokens_per_s: float
    p50_gap_ms: float
    p99_gap_ms: float

    @property
    def jitter_ms(self) -> float:
        return self.p99_gap_ms - self.p50_gap_ms

    def row(self) -> dict[str, float]:
        plain = {"tokens_per_s": self.tokens_per_s, "p99_gap_ms": self.p99_gap_ms, "jitter_ms": self.jitter_ms}
        settings = {name.removeprefix("scheduler."): value for name, value in self.candidate.values().items()}
        return {**settings, **{name: round(value, 1) for name, value in plain.items()}}


def candidates(block_tokens: int) -> list[Candidate]:
    """Chunks are whole blocks."""
    chunks = [chunk for chunk in CHUNKS if chunk % block_tokens == 0] or [block_tokens]
    prompts = [Candidate(chunk, chunk * together) for chunk, together in itertools.product(chunks, CHUNKS_A_PASS)]
    return prompts + [Candidate(max_sequences=number) for number in SEQUENCES]


def choose(measured: Iterable[Measured], max_gap_ms: float) -> Measured:
    """Of those within `max_gap_ms` and near the best rate among them, the one with the shortest gap; where none is
    within it, the one that comes nearest."""
    rows = list(measured)
    within = [row for row in rows if row.p99_gap_ms <= max_gap_ms]
    if not within:
        return min(rows, key=lambda row: row.p99_gap_ms)
    best = max(row.tokens_per_s for row in within)
    return min((row for row in within if row.tokens_per_s >= NEAR_BEST * best), key=lambda row: row.p99_gap_ms)


def load(settings: Settings, threads: int) -> Model:
    torch.set_num_threads(threads)
    return load_model(settings)


def sweep(
    model: Model,
    block_tokens: int,
    rounds: int,
    tell: Callable[[str], None],
    tried: Sequence[Candidate] | None = None,
) -> Iterator[Measured]:
    """Each candidate's medians over the rounds, which go through all of them in turn. `tell` hears of the progress."""
    tried = tried or candidates(block_tokens)
    runs: dict[Candidate, list[Measured]] = {candidate: [] for candidate in tried}
    for number, candidate in itertools.product(range(rounds), tried):
        tell(f"round {number + 1} of {rounds}: " + ", ".join(f"{k} {v}" for k, v in candidate.values().items()))
        runs[candidate].append(_measure(model, block_tokens, candidate))
    for candidate, measured in runs.items():
        yield Measured(candidate, *(statistics.median(values) for values in list(zip(*measured, strict=True))[1:]))


def _measure(model: Model, block_tokens: int, candidate: Candidate) -> Measured:
    num_sequences = candidate.max_sequences or NUM_PROMPTS
    longest = min(PROMPT_TOKENS + WARM_UP_STEPS + NUM_STEPS, model.config.context_tokens)
    num_pages = num_sequences * -(-longest // block_tokens)
    pool = PagePool(num_pages, model.page_form(block_tokens), max_idle=0)
    pool.data.zero_()  # fresh pages cost more than the pass
    engine = Engine(model, pool)
    try:
        return asyncio.run(_run(engine, candidate, num_sequences, longest))
    finally:
        engine.close()


async def _run(engine: Engine, candidate: Candidate, num_sequences: int, longest: int) -> Measured:
    if candidate.is_of_prompts:
        batch = Batch(engine, chunk_tokens=candidate.chunk_tokens, token_budget=candidate.token_budget)
        load = _Load(engine, batch, num_sequences, min(PROMPT_TOKENS, longest - 1), num_computed=0, num_tokens=1)
    else:
        block_tokens = engine.pool.block_tokens
        batch = Batch(engine, chunk_tokens=block_tokens, token_budget=num_sequences + block_tokens)
        num_tokens = min(WARM_UP_STEPS + NUM_STEPS, longest // 2)
        context = min(CTX_TOKENS, longest - num_tokens)
        load = _Load(engine, batch, num_sequences, context, num_computed=context - 1, num_tokens=num_tokens)
    began_s, passes_s = await load.run()
    times_s = [began_s, *passes_s]
    skipped = 0 if candidate.is_of_prompts else WARM_UP_STEPS
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)][skipped:]
    tokens = load.num_rows - skipped * num_sequences
    rate = tokens / (times_s[-1] - times_s[skipped])
    return Measured(candidate, rate, 1000 * percentile(gaps_s, 0.5), 1000 * percentile(gaps_s, 0.99))


class _Load:
    """Sequences of equal size that run until each has `num_tokens`; the first `num_computed` rows need no passes."""

    def __init__(
        self, engine: Engine, batch: Batch, num_sequences: int, num_prompt: int, num_computed: int, num_tokens: int
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._num_left = num_sequences
        self._num_tokens = num_tokens
        self._is_over = asyncio.Event()
        self.num_rows = num_sequences * (num_prompt - num_computed + num_tokens - 1)
        self._sequences = [self._sequence(number, num_prompt, num_computed) for number in range(num_sequences)]

    async def run(self) -> tuple[float, list[float]]:
        """When it began, and when each pass was over."""
        passes_s: list[float] = []
        self._batch.after_pass = lambda: passes_s.append(time.perf_counter())
        for sequence in self._sequences:
            self._batch.join(sequence)
        running = asyncio.create_task(self._batch.run())
        began_s = time.perf_counter()
        over = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            over.cancel()
        return began_s, passes_s

    def _sequence(self, number: int, num_prompt: int, num_computed: int) -> Running:
        vocab = self._engine.model.config.vocab_size
        tokens = [(1000 + k + 7 * number) % vocab for k in range(num_prompt)]
        pool = self._engine.pool
        pages = [pool.take() for _ in range(-(-num_computed // pool.block_tokens))]
        sampler = Sampler(GREEDY, 0, number, ())
        sequence = Running(tokens, pages, num_computed, lambda outcome: self._on_computed(sequence, outcome), [sampler])
        return sequence

    def _on_computed(self, sequence: Running, outcome: Outcome) -> None:
        assert isinstance(outcome, list)
        sequence.index += 1
        if sequence.index < self._num_tokens:
            sequence.token_ids.append(outcome[0].id)
            return
        self._batch.leave(sequence)
        self._num_left -= 1
        if not self._num_left:
            asyncio.get_running_loop().call_soon(self._is_over.set)  # after this pass is told
