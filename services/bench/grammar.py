"""What a grammar costs a step: sequences held to a schema and free ones, in turns, step by step."""

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
from services.engine.engine import Engine, Work
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
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
    """For each size: median times of a step, held to the schema and free, and the ratio of the means."""
    torch.set_num_threads(threads)
    text = load_text(resolve(settings.compute.model, Path(settings.kv.data_dir)))
    began_s = time.perf_counter()
    compiled = asyncio.run(text.grammars.of(JsonSchema(NamedSchema(schema=SCHEMA)), is_checked=False))
    yield {"compile_first_s": round(time.perf_counter() - began_s, 3), "arithmetic": settings.compute.dtype}
    prompt = resolve_prompt(Job(messages=[Message(role="user", content=QUESTION)]), text)
    model, block_tokens = load_model(settings), settings.kv.block_tokens
    pages_each = -(-(len(prompt) + num_steps) // block_tokens)
    for batch in batches:
        pool = PagePool(2 * batch * pages_each, model.page_form(block_tokens), max_idle=0)
        engine = Engine(model, pool)
        pages = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(2 * batch)]
        held = _Group(engine, prompt, pages[:batch], compiled)
        free = _Group(engine, prompt, pages[batch:], None)
        try:
            held_s, free_s = [], []
            for _ in range(num_steps):
                held_s.append(held.step_s())
                free_s.append(free.step_s())
        finally:
            engine.close()
        yield {
            "batch": batch,
            "held_ms": round(1000 * statistics.median(held_s), 3),
            "free_ms": round(1000 * statistics.median(free_s), 3),
            "tpot_ratio": round(statistics.mean(held_s[1:]) / statistics.mean(free_s[1:]), 3),
        }


class _Group:
    """Sequences of one prompt, each with a seed of its own."""

    def __init__(self, engine: Engine, prompt: list[int], pages: list[list[int]], grammar: Grammar | None) -> None:
        self._engine = engine
        self._pages = pages
        self._samplers = [
            Sampler(DRAWN, 1, number, (), grammar.matcher() if grammar else None) for number in range(len(pages))
        ]
        self._rows = [list(prompt) for _ in pages]
        self._start = self._index = 0

    def step_s(self) -> float:
        """One step of all; the first one computes their prompts."""
        end = self._start + len(self._rows[0])
        used = -(-end // self._engine.pool.block_tokens)
        began_s = time.perf_counter()
        works = [
            Work(rows, self._start, own[:used], [sampler], self._index)
            for rows, own, sampler in zip(self._rows, self._pages, self._samplers, strict=True)
        ]
        outcomes = self._engine.run_now(works)
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, list):
                raise outcome
            self._samplers[number].note(outcome[0].id)
            self._rows[number] = [outcome[0].id]
        self._start, self._index = end, self._index + 1
        return time.perf_counter() - began_s
