"""What a grammar costs a token: sequences held to a schema and free ones, in turns, step by step."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from schemas.job import Job, Message, Sampling
from schemas.response_format import JsonSchema, NamedSchema
from services.bench.engine import Row, load_model
from services.engine.engine import Engine, Outcome, Work
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.engine.speculation import NO_MARGIN, share_out
from services.models.registry import resolve
from services.settings import Settings
from services.text.grammar import Grammar
from services.text.model import load_text
from services.text.prompt import resolve_prompt

DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)
QUESTION = "List the things that a small shop sells, as JSON."
THING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "count": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["food", "drink", "tool", "other"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
# Longer than any run, so that nobody ends before the others.
SCHEMA = {"type": "array", "items": THING, "minItems": 100_000}


def run(settings: Settings, threads: int, batches: Sequence[int], num_steps: int) -> Iterator[Row]:
    """For each size: median times of a step, held to the schema and free, and the ratio of the means (`step_ratio`).
    As it is served, tokens that the schema forces are computed beside the one before them: `forced_share` of all, and
    then the time of a token is `tpot_ratio` of a free one's.
    """
    torch.set_num_threads(threads)
    text = load_text(resolve(settings.compute.model, Path(settings.kv.data_dir)))
    began_s = time.perf_counter()
    compiled = asyncio.run(text.grammars.of(JsonSchema(NamedSchema(schema=SCHEMA)), is_checked=False))
    yield {"compile_first_s": round(time.perf_counter() - began_s, 3), "arithmetic": settings.compute.dtype}
    prompt = resolve_prompt(Job(messages=[Message(role="user", content=QUESTION)]), text)
    model, block_tokens = load_model(settings), settings.kv.block_tokens
    max_forced = settings.scheduler.max_proposals
    pages_each = -(-(len(prompt) + num_steps * (1 + max_forced)) // block_tokens)
    for batch in batches:
        pool = PagePool(3 * batch * pages_each, model.page_form(block_tokens), max_idle=0)
        engine = Engine(model, pool)
        pages = [range(i * pages_each, (i + 1) * pages_each) for i in range(3 * batch)]
        masked = _Group(engine, prompt, pages[:batch], compiled)
        served = _Group(engine, prompt, pages[batch : 2 * batch], compiled, max_forced)
        free = _Group(engine, prompt, pages[2 * batch :], None)
        try:
            for step in range(num_steps):
                masked.step()
                free.step()
                if step < 2 or served.length <= step:  # the others' texts are as long then
                    served.step()
        finally:
            engine.close()
        yield {
            "batch": batch,
            "held_ms": masked.step_ms,
            "free_ms": free.step_ms,
            "step_ratio": round(masked.token_s / free.token_s, 3),
            "forced_share": round(served.forced_share, 3),
            "tpot_ratio": round(served.token_s / free.token_s, 3),
        }


class _Group:
    """Sequences of one prompt, each with a seed of its own. `max_forced`: tokens that the grammar leaves no choice
    about, and that are computed beside the one before them."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        pages: Sequence[Sequence[int]],
        grammar: Grammar | None,
        max_forced: int = 0,
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._max_forced = max_forced
        self._samplers = [
            Sampler(DRAWN, 1, number, (), grammar.matcher() if grammar else None) for number in range(len(pages))
        ]
        self._missing = [list(prompt) for _ in pages]
        self._starts = [0] * len(pages)
        self._indices = [0] * len(pages)
        self._times_s: list[float] = []
        self._num_tokens: list[int] = []

    @property
    def step_ms(self) -> float:
        return round(1000 * statistics.median(self._times_s[1:]), 3)

    @property
    def length(self) -> float:
        """Tokens of a sequence, on average."""
        return sum(self._num_tokens) / len(self._pages)

    @property
    def token_s(self) -> float:
        """Of one sequence, on average."""
        return sum(self._times_s[1:]) / sum(self._num_tokens[1:]) * len(self._pages)

    @property
    def forced_share(self) -> float:
        """Of the tokens, those that came beside another."""
        return 1 - len(self._times_s[1:]) * len(self._pages) / sum(self._num_tokens[1:])

    def step(self) -> None:
        """One pass of all; the first one computes their prompts."""
        began_s = time.perf_counter()
        outcomes = self._engine.run_now([self._work(number, draft) for number, draft in enumerate(self._drafts())])
        num_tokens = sum(self._note(number, outcome) for number, outcome in enumerate(outcomes))
        self._times_s.append(time.perf_counter() - began_s)
        self._num_tokens.append(num_tokens)

    def _drafts(self) -> list[list[int]]:
        batch = len(self._pages)
        if not self._max_forced:
            return [[] for _ in range(batch)]
        forced = [sampler.forced()[: self._max_forced] for sampler in self._samplers]
        chances = [[1.0] * len(tokens) for tokens in forced]
        cost = self._engine.step_cost
        counts = share_out(chances, batch, batch, cost, batch * self._max_forced, certain=NO_MARGIN)
        return [tokens[:count] for tokens, count in zip(forced, counts, strict=True)]

    def _work(self, number: int, draft: list[int]) -> Work:
        sampler, start, missing = self._samplers[number], self._starts[number], self._missing[number]
        num_pages = -(-(start + len(missing) + len(draft)) // self._engine.pool.block_tokens)
        return Work(
            missing, start, list(self._pages[number][:num_pages]), [sampler], self._indices[number], draft=draft
        )

    def _note(self, number: int, outcome: Outcome) -> int:
        """How many tokens it has more."""
        if not isinstance(outcome, list):
            raise outcome
        for sampled in outcome:
            self._samplers[number].note(sampled.id)
        self._starts[number] += len(self._missing[number]) + len(outcome) - 1
        self._indices[number] += len(outcome)
        self._missing[number] = [outcome[-1].id]
        return len(outcome)
