"""Whatever happens beside a sequence, its tokens are those that it has alone: joins, leaves, cancels, guesses, NaN."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from schemas.job import Sampling
from schemas.response_format import JsonSchema, NamedSchema
from services.engine.batch import Batch
from services.engine.drafter import Drafter
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.pages import PagePool
from tests.engine.requests import (
    BLOCK_TOKENS,
    CheapRows,
    GuessCount,
    KnowingDrafter,
    Request,
    alone,
    check_named,
    make_pool,
    start,
    stop,
)
from tests.engine.tiny_native import tiny_native
from tests.gateway.tiny_model import EOS
from tests.pipeline.tiny import tiny_model

MakeModel = Callable[[], Model]
MODELS: dict[str, MakeModel] = {
    "bfloat16": lambda: tiny_model("bfloat16"),
    "native int8": tiny_native,
    "native int8, KV too": lambda: tiny_native("int8"),
}
PARTS = [(kind, part) for kind in MODELS for part in range(1 if kind == "bfloat16" else 3)]

AN_ANSWER = JsonSchema(NamedSchema(schema={"type": "array", "items": {"enum": ["yes", "no", 3]}, "minItems": 4}))
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {100: 3.0}, "logprobs": 2},
    {"temperature": 1.0, "response_format": AN_ANSWER},
    {"temperature": 0.7, "response_format": AN_ANSWER, "logprobs": 2, "frequency_penalty": 0.2},
)
NUM_SCHEDULES = 100


@cache
def known_requests(kind: str) -> list[tuple[Request, list[int]]]:
    """With the tokens of each. Some prompts share blocks; some are others cut or continued; lengths of all kinds."""
    model = MODELS[kind]()
    chance = random.Random(11)
    shared = [chance.randrange(3, 250) for _ in range(3 * BLOCK_TOKENS)]
    requests = []
    for number in range(24):
        head = shared[: chance.choice([0, 0, BLOCK_TOKENS, 40, 48])]
        prompt = head + [chance.randrange(3, 250) for _ in range(chance.choice([1, 2, 15, 16, 17, 40]))]
        sampling = Sampling(max_tokens=chance.randrange(1, 45), seed=number, **KINDS[number % len(KINDS)])  # type: ignore[arg-type]
        request = Request(prompt, sampling, choice=number % 2, stop_ids=(EOS,) if sampling.constraint else ())
        tokens = alone(model, request)
        if number % 6 == 5 and len(tokens) > 3:  # one that ends by itself
            request = replace(request, stop_ids=(tokens[len(tokens) // 2],))
            tokens = alone(model, request)
        requests.append((request, tokens))
    return requests


class Schedule:
    """Some of the requests, joining, cancelled and spoilt as `chance` says after each pass."""

    def __init__(
        self, known: list[tuple[Request, list[int]]], batch: Batch, pool: PagePool, chance: random.Random
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.chance = chance
        self.truth = {}
        self.waiting = []
        for request, tokens in chance.sample(known, chance.randint(2, 8)):
            fresh = Request(request.prompt, request.sampling, request.choice, request.stop_ids)
            self.truth[id(fresh)] = tokens
            self.waiting.append(fresh)
        self.requests = list(self.waiting)
        self.cancelled = chance.choice([None, None, *self.requests])
        self.spoilt = chance.choice([None, *self.requests])
        self.planted = False
        self.guessing = chance.random() < 0.7
        batch.after_pass = self.disturb
        self.join()

    def join(self) -> None:
        start(self.batch, self.pool, self.waiting.pop(), self.drafter if self.guessing else None)

    def drafter(self, request: Request, tokens: list[int]) -> Drafter:
        if self.chance.random() < 0.3:
            return Drafter(tokens)
        return KnowingDrafter(tokens, [request.prompt + self.truth[id(request)]], self.chance)

    def disturb(self) -> None:
        chance = self.chance
        if self.cancelled is not None and chance.random() < 0.15:
            stop(self.batch, self.cancelled)
        if self.spoilt is not None and not self.planted and chance.random() < 0.3:
            self.planted = self.plant(self.spoilt)
        while self.waiting and (chance.random() < 0.5 or not len(self.batch)):
            self.join()

    def plant(self, request: Request) -> bool:
        """A NaN in K or V of one of its tokens (or their scale), in a page that is its own; False while it has none."""
        sequence = request.sequence
        if sequence is None or request.done.is_set() or sequence.num_computed % BLOCK_TOKENS == 0:
            return False
        page = sequence.pages[sequence.num_computed // BLOCK_TOKENS]
        at = (self.chance.randrange(2), self.chance.randrange(2), self.chance.randrange(2))
        slot = self.chance.randrange(sequence.num_computed % BLOCK_TOKENS)
        form, channel = self.pool.form, self.chance.randrange(16)
        if form.is_quantised:
            form.scales(self.pool.data)[(page, *at, slot)] = math.nan
        else:
            self.pool.data[(page, *at, slot, channel)] = math.nan
        return True

    def check(self) -> None:
        for request in self.requests:
            truth = self.truth[id(request)]
            if request is self.spoilt and self.planted and request.error is not None:
                assert request.tokens == truth[: len(request.tokens)] and len(request.tokens) < len(truth)
            elif request is self.cancelled:
                assert request.tokens == truth[: len(request.tokens)] and request.error is None
            else:
                assert request.error is None and request.tokens == truth


async def run_schedule(
    engine: Engine, known: list[tuple[Request, list[int]]], guesses: GuessCount, seed: int
) -> Schedule:
    pool = engine.pool
    chance = random.Random(seed)
    batch = Batch(
        engine,
        chunk_tokens=chance.choice([16, 32, 64]),
        token_budget=chance.choice([24, 80, 256]),
        slice_s=chance.choice([0.001, math.inf]),
        max_draft=chance.choice([1, 3, 8]),
    )
    guesses.watch(engine)
    engine.step_cost = CheapRows(chance.choice([1e-9, 1e-4, 3e-4]))
    schedule = Schedule(known, batch, pool, chance)
    task = asyncio.create_task(batch.run())
    ends = asyncio.gather(*(request.done.wait() for request in schedule.requests))
    await asyncio.wait([task, ends], return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task
    task.cancel()
    await asyncio.wait([task])
    return schedule


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_nobody_notices_what_happens_beside_him(kind: str, part: int) -> None:
    model, known = MODELS[kind](), known_requests(kind)
    guesses = GuessCount()
    num_spoilt = num_named = 0
    num_schedules = NUM_SCHEDULES if kind != "bfloat16" else NUM_SCHEDULES // 3  # its steps are slower
    for number in range(num_schedules):
        pool = make_pool(model, 60)
        pool.reserve(60)
        engine = Engine(model, pool)
        try:
            schedule = asyncio.run(run_schedule(engine, known, guesses, NUM_SCHEDULES * part + number))
        finally:
            engine.close()
        schedule.check()
        pool.check_integrity()
        num_named += check_named(pool, schedule.requests)
        num_spoilt += any(request.error is not None for request in schedule.requests)
    assert num_spoilt > num_schedules // 5 and num_named > num_schedules
    assert guesses.num_accepted > num_schedules and guesses.num_refused > num_schedules
