"""Requests run by a real batch over the tiny model, without jobs, text or a store, whose steps a test may disturb."""

import asyncio
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache

from kvstore.keys import BlockRef
from schemas.errors import NotFinite
from schemas.job import Sampling
from schemas.response_format import Constrained
from services.engine.batch import Batch
from services.engine.drafter import Drafter
from services.engine.engine import Engine, Outcome, Work
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.engine.sequence import Sequence
from services.engine.step_cost import StepCost
from services.text.grammar import Compiler, Grammar
from services.text.grammar_source import Source
from services.text.vocabulary import Vocabulary
from tests.kvstore.blocks import BLOCK_TOKENS, refs_of
from tests.pipeline.tiny import tiny_pipeline_text


class CheapRows(StepCost):
    """Every guess is worth its row; 1 ms computes `1 / (1000 * row_s)` of them."""

    is_known = True

    def __init__(self, row_s: float) -> None:
        super().__init__()
        self._own_s = row_s

    @property
    def row_s(self) -> float:
        return self._own_s

    def seconds(self, rows: float) -> float:
        return 1.0


class KnowingDrafter(Drafter):
    """Guesses as that of `truths` goes on which begins so, wrong now and then: runs end in every place."""

    def __init__(self, tokens: list[int], truths: list[list[int]], chance: random.Random) -> None:
        super().__init__(tokens)
        self._truths = truths
        self._chance = chance

    def chances(self, count: int) -> list[float]:
        return [1.0] * self._chance.randint(0, count)

    def draft(self, count: int) -> list[int]:
        known = len(self._tokens)
        truth = next((truth for truth in self._truths if truth[:known] == self._tokens), [])
        guesses = [*truth[known : known + count], *[3] * count][:count]
        return [3 if self._chance.random() < 0.2 else token for token in guesses]


class GuessCount:
    """What came of the guesses that an engine was given."""

    def __init__(self) -> None:
        self.num_accepted = self.num_refused = 0
        self.runs: list[list[int]] = []  # the ids that each gave

    def watch(self, engine: Engine) -> None:
        run = engine.run

        async def counted(works: Seq[Work]) -> list[Outcome]:
            outcomes = await run(works)
            for work, outcome in zip(works, outcomes, strict=True):
                if work.draft and not isinstance(outcome, NotFinite):
                    self.num_accepted += len(outcome) - 1
                    self.num_refused += 1 + len(work.draft) - len(outcome)
                    self.runs.append([sampled.id for sampled in outcome])
            return outcomes

        engine.run = counted  # type: ignore[method-assign]


@dataclass
class Request:
    """`sampling.max_tokens` and `seed` are set. `tokens` and `error` are what it came to."""

    prompt: list[int]
    sampling: Sampling
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    error: NotFinite | None = None
    sequence: Sequence | None = None
    named: list[tuple[BlockRef, int, bytes]] = field(default_factory=list)  # block, its page, and what was in it then
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_pages(self) -> int:
        assert self.sampling.max_tokens is not None
        return -(-(len(self.prompt) + self.sampling.max_tokens) // BLOCK_TOKENS)


MakeDrafter = Callable[[Request, list[int]], Drafter | None]


def start(batch: Batch, pool: PagePool, request: Request, make_drafter: MakeDrafter | None = None) -> None:
    """Joins the batch; `request.done` is set at its end. Pages are reserved by the caller."""
    sampling = request.sampling
    assert sampling.seed is not None and sampling.max_tokens is not None
    max_tokens = sampling.max_tokens
    matcher = grammar_of(sampling.constraint).matcher() if sampling.constraint else None
    sampler = Sampler(sampling, sampling.seed, request.choice, request.prompt, matcher)

    def on_computed(outcome: Outcome) -> None:
        if not isinstance(outcome, list):
            assert isinstance(outcome, NotFinite)
            request.error = outcome
            stop(batch, request)
            return
        (sampled,) = outcome
        request.tokens.append(sampled.id)
        if len(request.tokens) == max_tokens or sampled.id in request.stop_ids:
            stop(batch, request)
            return
        sequence.token_ids.append(sampled.id)
        sequence.index += 1
        sampler.note(sampled.id)

    def on_block_full(block: int) -> None:
        ref = refs_of(sequence.token_ids[: (block + 1) * BLOCK_TOKENS])[-1]
        page = sequence.pages[block]
        pool.name(page, ref)
        request.named.append((ref, page, content(pool, page)))

    tokens = list(request.prompt)
    sequence = request.sequence = Sequence(
        token_ids=tokens,
        pages=pool.merge([ref for ref in refs_of(tokens[:-1]) if ref.num_tokens == BLOCK_TOKENS]),
        num_computed=0,
        on_computed=on_computed,
        samplers=[sampler],
        on_block_full=on_block_full,
        drafter=make_drafter(request, tokens) if make_drafter else None,
        max_tokens=len(tokens) + max_tokens,
    )
    sequence.num_computed = len(sequence.pages) * BLOCK_TOKENS
    batch.join(sequence)


@cache
def compiler() -> Compiler:
    text = tiny_pipeline_text()
    return Compiler(Vocabulary.of(text.tokenizer, text.vocab_size, text.eos_ids), text.tokenizer.encode)


def grammar_of(wanted: Constrained) -> Grammar:
    return compiler().compile(Source.of(wanted))


def stop(batch: Batch, request: Request) -> None:
    """Also in the middle: a cancel."""
    if request.sequence is not None and not request.done.is_set():
        batch.leave(request.sequence)
        request.done.set()


def alone(model: Model, request: Request) -> list[int]:
    """Its tokens with nobody beside it and nothing guessed."""
    pool = make_pool(model, request.num_pages)
    engine = Engine(model, pool)
    copy = Request(request.prompt, request.sampling, request.choice, request.stop_ids)

    async def run() -> None:
        pool.reserve(copy.num_pages)
        batch = Batch(engine, chunk_tokens=64, token_budget=256)
        task = asyncio.create_task(batch.run())
        start(batch, pool, copy)
        await copy.done.wait()
        task.cancel()

    try:
        asyncio.run(run())
    finally:
        engine.close()
    return copy.tokens


def check_named(pool: PagePool, requests: Iterable[Request]) -> int:
    """Whatever got a name is finite and as it was then; how many pages that were."""
    num_checked = 0
    for ref, page, before in (named for request in requests for named in request.named):
        pages = pool.merge([ref])
        if pages == [page]:  # else it went, or another had the name already
            assert content(pool, page) == before
            held = pool.form.scales(pool.data) if pool.form.is_quantised else pool.data
            assert held[page].isfinite().all()
            num_checked += 1
        pool.release(pages)
    return num_checked


def content(pool: PagePool, page: int) -> bytes:
    return b"".join(part.tobytes() for part in pool.leading(page, BLOCK_TOKENS))


def make_pool(model: Model, num_pages: int) -> PagePool:
    return PagePool(num_pages, model.page_form(BLOCK_TOKENS), max_idle=num_pages)
