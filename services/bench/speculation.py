"""What guessed tokens bring: ten kept tasks that repeat much of their prompt, and free text, with and without."""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from schemas.errors import Internal
from schemas.job import Job, Message, Sampling
from services.bench.edit_tasks import FREE_TEXTS, TASKS
from services.bench.engine import load_model
from services.engine.batch import Batch
from services.engine.drafter import Drafter
from services.engine.engine import Engine, Outcome
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.engine.sequence import Sequence
from services.models.registry import resolve
from services.settings import Settings
from services.text.model import TextModel, load_text
from services.text.prompt import resolve_prompt

TASK = Sampling(temperature=0.0, seed=1)
FREE_TEXT = Sampling(temperature=0.8, top_p=0.95, seed=1)  # greedy, a small model would soon repeat itself


@dataclass
class Run:
    """`seconds` from the first generated token on. `num_steps` passes made `tokens`."""

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    num_steps: int = 0
    num_guessed: int = 0
    num_accepted: int = 0

    @property
    def tok_s(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


def run(settings: Settings, threads: int, num_tokens: int, rounds: int) -> Iterator[dict[str, str | int | float]]:
    """One row a task, and one of medians for each kind: tokens/s of a lone sequence with and without guesses.

    Both run in turns, `rounds` times, up to `num_tokens` or the end token. Raises `Internal` if a token differs.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    model, text = load_model(settings), load_text(resolve(settings.compute.model, Path(settings.kv.data_dir)))
    block_tokens = settings.kv.block_tokens
    pool = PagePool(-(-text.context_tokens // block_tokens), model.page_form(block_tokens), max_idle=0)
    pool.reserve(pool.num_pages)
    engine = Engine(model, pool)
    try:
        for kind, prompts, sampling in (("edit", TASKS, TASK), ("free", FREE_TEXTS, FREE_TEXT)):
            rows = []
            for name, prompt in prompts.items():
                ids = prompt_ids(text, prompt)
                rows.append(_compared(engine, settings, text, ids, sampling, num_tokens, rounds))
                yield {"kind": kind, "task": name, "prompt": len(ids), **rows[-1]}
            yield {
                "kind": kind,
                "task": "median",
                **{key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]},
            }
    finally:
        engine.close()


def prompt_ids(text: TextModel, prompt: str) -> list[int]:
    return resolve_prompt(Job(messages=[Message(role="user", content=prompt)]), text)


def _compared(
    engine: Engine,
    settings: Settings,
    text: TextModel,
    prompt: list[int],
    sampling: Sampling,
    num_tokens: int,
    rounds: int,
) -> dict[str, float]:
    plains, guesseds = [], []
    for _ in range(rounds):
        plain = generate(engine, settings, prompt, sampling, num_tokens, text.eos_ids, max_draft=0)
        guessed = generate(
            engine, settings, prompt, sampling, num_tokens, text.eos_ids, max_draft=settings.scheduler.max_proposals
        )
        if plain.tokens != guessed.tokens:
            raise Internal("guesses changed a token")
        plains.append(plain.tok_s)
        guesseds.append(guessed.tok_s)
    return {
        "tokens": len(guessed.tokens),
        "plain_tok_s": round(statistics.median(plains), 1),
        "lookup_tok_s": round(statistics.median(guesseds), 1),
        "ratio": round(statistics.median(guesseds) / statistics.median(plains), 3),
        "tokens_a_step": round(len(guessed.tokens) / guessed.num_steps, 2),
        "guessed": guessed.num_guessed,
        "accepted": round(guessed.num_accepted / max(1, guessed.num_guessed), 3),
    }


def generate(
    engine: Engine,
    settings: Settings,
    prompt: list[int],
    sampling: Sampling,
    num_tokens: int,
    eos_ids: tuple[int, ...],
    *,
    max_draft: int,
) -> Run:
    """By the batch that workers use, alone in it. `max_draft` 0: nothing is guessed."""
    return asyncio.run(_generate(engine, settings, prompt, sampling, num_tokens, eos_ids, max_draft))


async def _generate(
    engine: Engine,
    settings: Settings,
    prompt: list[int],
    sampling: Sampling,
    num_tokens: int,
    eos_ids: tuple[int, ...],
    max_draft: int,
) -> Run:
    run, done = Run(), asyncio.Event()
    batch = Batch(
        engine,
        chunk_tokens=settings.scheduler.chunk_tokens,
        token_budget=settings.scheduler.token_budget,
        max_draft=max_draft,
    )
    sampler = Sampler(sampling, sampling.seed or 0, 0, prompt)
    tokens = list(prompt)
    began_s = 0.0

    def on_computed(outcome: Outcome) -> None:
        nonlocal began_s
        if not isinstance(outcome, list):
            raise outcome
        (sampled,) = outcome
        if not run.tokens:
            began_s = time.perf_counter()
        run.tokens.append(sampled.id)
        if len(run.tokens) == num_tokens or sampled.id in eos_ids:
            run.seconds = time.perf_counter() - began_s
            batch.leave(sequence)
            done.set()
            return
        tokens.append(sampled.id)
        sequence.index += 1
        sampler.note(sampled.id)

    sequence = Sequence(
        token_ids=tokens,
        pages=[],
        num_computed=0,
        on_computed=on_computed,
        samplers=[sampler],
        drafter=_CountingDrafter(tokens, run) if max_draft else None,
        max_tokens=len(prompt) + num_tokens,
    )
    batch.after_pass = lambda: _count_step(run)
    batch.join(sequence)
    passes = asyncio.create_task(batch.run())
    finished = asyncio.create_task(done.wait())
    await asyncio.wait([passes, finished], return_when=asyncio.FIRST_COMPLETED)
    if passes.done():
        passes.result()
    passes.cancel()
    run.num_accepted = len(run.tokens) - run.num_steps
    return run


def _count_step(run: Run) -> None:
    run.num_steps += bool(run.tokens)


class _CountingDrafter(Drafter):
    def __init__(self, tokens: list[int], run: Run) -> None:
        super().__init__(tokens)
        self._counted = run

    def draft(self, count: int) -> list[int]:
        guesses = super().draft(count)
        self._counted.num_guessed += len(guesses)
        return guesses
