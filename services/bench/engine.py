"""Prefill and decode speed of the bare engine: no queue, no store, no text; alone, or in turns with other engines."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.sampling import choose
from schemas.job import Sampling
from services.bench.machine import ReadBandwidth, processor
from services.bench.passages import PASSAGES
from services.bench.peer import Peer, Place
from services.bench.percentiles import spread_ms
from services.engine import loading
from services.engine.arithmetic import choose_arithmetic
from services.engine.engine import Engine, Work
from services.engine.model import Model, Span
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.engine.stepper import Stepper
from services.models.compute_dtype import concrete_dtype
from services.models.registry import resolve
from services.settings import Settings
from services.text.detokenizer import Detokenizer
from services.text.model import load_text
from services.text.tokenizer import Tokenizer

Row = dict[str, str | int | float]

GREEDY = Sampling(temperature=0.0)
WARM_UP_STEPS = 3
CHOICES = 30
STRIDE = 37  # tokens between the beginnings of two sequences in the text


@dataclass(frozen=True)
class Asked:
    """What to measure. `cores` are those of this process; `places` the peers to measure in turn with ours."""

    batches: Sequence[int]
    ctx_tokens: int
    num_steps: int
    threads: int
    cores: list[int]
    rounds: int = 1
    sampling: Sampling = GREEDY
    has_roofline: bool = False
    places: Sequence[tuple[str, str, str]] = ()  # name, Python and model as the user said, perhaps ""
    env: Mapping[str, str] = field(default_factory=dict)


def run(settings: Settings, asked: Asked) -> Iterator[Row]:
    """One row that names the machine, then one for each batch size.

    Rates are tokens/s of all sequences together, medians of the rounds; a step's percentiles are over all rounds.
    Each sequence has a prompt of `ctx_tokens` of its own; prefill runs in the scheduler's chunks and budget.
    """
    torch.set_num_threads(asked.threads)
    files = resolve(settings.compute.model, Path(settings.kv.data_dir))
    places = [Place.of(name, files, python, model) for name, python, model in asked.places]
    sizes = max(asked.batches), asked.ctx_tokens, asked.num_steps
    with contextlib.ExitStack() as stack:
        rivals = [stack.enter_context(Peer(place, asked.env, asked.cores, asked.threads, sizes)) for place in places]
        ours = Bench(settings, load_model(settings), load_text(files).tokenizer)
        yield {
            **processor(),
            "arithmetic": ours.model.arithmetic.name,
            "threads": asked.threads,
            "ctx": asked.ctx_tokens,
            "rounds": asked.rounds,
            **{rival.name: rival.engine for rival in rivals},
        }
        bandwidth = ReadBandwidth() if asked.has_roofline else None
        for batch in asked.batches:
            yield _row(asked, batch, ours, rivals, bandwidth)


def load_model(settings: Settings, dtype: str = "") -> Model:
    """Of `dtype`; "": that of the settings. Raises `SetupError`."""
    files = resolve(settings.compute.model, Path(settings.kv.data_dir))
    config = ModelConfig.from_hf(files.config)
    dtype = concrete_dtype(dtype or settings.compute.dtype, files)
    return loading.load_model(files, choose_arithmetic(config, dtype, settings.kv.quantisation))


@dataclass
class Measured:
    """Of one batch, over all rounds. `choosing_s` and `text_s`: what of the steps was sampling and detokenising."""

    prefill_tok_s: list[float] = field(default_factory=list)
    decode_tok_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    choosing_s: float = 0.0
    text_s: float = 0.0


class Bench:
    """Our engine around one loaded model."""

    def __init__(self, settings: Settings, model: Model, tokenizer: Tokenizer) -> None:
        self.model = model
        self._settings = settings
        self._tokenizer = tokenizer
        self._text = tokenizer.encode("\n\n".join(PASSAGES))

    def _tokens(self, number: int, count: int) -> list[int]:
        """Of sequence `number`: real text, since nonsense makes flat rows, which cost more to sample."""
        return [self._text[(k + STRIDE * number) % len(self._text)] for k in range(count)]

    def measure(self, batch: int, ctx_tokens: int, num_steps: int, sampling: Sampling, into: Measured) -> None:
        block_tokens = self._settings.kv.block_tokens
        pages_each = -(-(ctx_tokens + num_steps + WARM_UP_STEPS) // block_tokens)
        pool = PagePool(batch * pages_each, self.model.page_form(block_tokens), max_idle=0)
        pool.data.zero_()  # fresh pages and first calls are not what is measured
        engine = Engine(self.model, pool)
        pages = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(batch)]
        texts = [self._tokens(number, ctx_tokens + WARM_UP_STEPS + num_steps) for number in range(batch)]
        prompts = [text[:ctx_tokens] for text in texts]
        try:
            _prefill(engine, self._settings, prompts[:1], pages[:1])
            began_s = time.perf_counter()
            _prefill(engine, self._settings, prompts, pages)
            into.prefill_tok_s.append(batch * ctx_tokens / (time.perf_counter() - began_s))
            steps = _Steps(engine, pages, texts, self._tokenizer, sampling)
            steps.run(ctx_tokens, WARM_UP_STEPS, Measured())
            before = len(into.steps_s)
            steps.run(ctx_tokens + WARM_UP_STEPS, num_steps, into)
            into.decode_tok_s.append(batch * num_steps / sum(into.steps_s[before:]))
            if isinstance(self.model, Stepper):  # which chooses in its own call: the same choice by itself
                rows = -(-batch // torch.get_num_threads())  # of each thread
                into.choosing_s += rows * num_steps * self._choice_s(pool, pages[0], ctx_tokens, sampling)
        finally:
            engine.close()

    def _choice_s(self, pool: PagePool, pages: list[int], position: int, sampling: Sampling) -> float:
        """What choosing one token takes, from logits of this text."""
        span = Span(position, 1, pages[: position // pool.block_tokens + 1])
        logits = self.model.forward(self._tokens(0, position + 1)[-1:], [span], pool.data, [0]).numpy()[0]
        sampler, times_s = Sampler(sampling, 0, 0, ()), []
        for index in range(CHOICES):
            began_s = time.perf_counter()
            choose(logits, sampler.draw(index))
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s)

    def step_bytes(self, batch: int, tokens: int) -> int:
        """What one step of `batch` sequences with `tokens` each reads: all weights once, and all of K and V."""
        return self.model.weight_bytes + batch * tokens * self.model.kv_bytes_per_token


class _Steps:
    """Decode steps of some sequences, with samplers and detokenisers, as a worker's; the text goes on as written."""

    def __init__(
        self,
        engine: Engine,
        pages: list[list[int]],
        texts: list[list[int]],
        tokenizer: Tokenizer,
        sampling: Sampling,
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._texts = texts
        self._samplers = [Sampler(sampling, 0, number, ()) for number in range(len(pages))]
        self._detokenizers = [Detokenizer(tokenizer, []) for _ in pages]
        self._index = 0

    def run(self, start: int, num_steps: int, into: Measured) -> None:
        chosen_before_s = self._engine.sampling_s
        for position in range(start, start + num_steps):
            used = -(-(position + 1) // self._engine.pool.block_tokens)
            works = [
                Work([text[position]], position, own[:used], [sampler], self._index)
                for text, own, sampler in zip(self._texts, self._pages, self._samplers, strict=True)
            ]
            began_s = time.perf_counter()
            outcomes = self._engine.run_now(works)
            computed_s = time.perf_counter()
            for detokenizer, outcome in zip(self._detokenizers, outcomes, strict=True):
                assert isinstance(outcome, list)
                detokenizer.push(outcome[0].id)
            ended_s = time.perf_counter()
            into.steps_s.append(ended_s - began_s)
            into.text_s += ended_s - computed_s
            self._index += 1
        into.choosing_s += self._engine.sampling_s - chosen_before_s


def _row(asked: Asked, batch: int, ours: Bench, rivals: Sequence[Peer], bandwidth: ReadBandwidth | None) -> Row:
    measured = Measured()
    theirs: dict[str, list[dict[str, float]]] = {rival.name: [] for rival in rivals}
    for _ in range(asked.rounds):
        ours.measure(batch, asked.ctx_tokens, asked.num_steps, asked.sampling, measured)
        if bandwidth is not None:
            bandwidth.measure()
        for rival in rivals:
            theirs[rival.name].append(rival.measure(batch, asked.ctx_tokens, asked.num_steps))
    prefill, decode = statistics.median(measured.prefill_tok_s), statistics.median(measured.decode_tok_s)
    row: Row = {"batch": batch, "prefill_tok_s": round(prefill, 1), "decode_tok_s": round(decode, 1)}
    for name, rounds in theirs.items():
        for what, rate in (("prefill", prefill), ("decode", decode)):
            their_rate = statistics.median(measurement[f"{what}_tok_s"] for measurement in rounds)
            row |= {f"{name}_{what}_tok_s": round(their_rate, 1), f"{what}_ratio_{name}": round(rate / their_rate, 2)}
    row |= {f"step_{name}": value for name, value in spread_ms(measured.steps_s).items()}
    row["steps"] = len(measured.steps_s)
    row["sampling_and_text_share"] = round((measured.choosing_s + measured.text_s) / sum(measured.steps_s), 4)
    if bandwidth is not None and ours.model.weight_bytes:
        read = ours.step_bytes(batch, asked.ctx_tokens + WARM_UP_STEPS + asked.num_steps // 2)
        best_s = read / (bandwidth.gb_s * 1e9)
        row |= {"step_mb": round(read / 1e6, 1), "read_gb_s": round(bandwidth.gb_s, 1)}
        row["of_roofline"] = round(best_s / statistics.median(measured.steps_s), 3)
    return row


def _prefill(engine: Engine, settings: Settings, prompts: list[list[int]], pages: list[list[int]]) -> None:
    """In the scheduler's passes: the first chunk of as many prompts as the budget takes, then the second chunks."""
    chunk = settings.scheduler.chunk_tokens
    together = max(1, settings.scheduler.token_budget // chunk)
    for start in range(0, len(prompts[0]), chunk):
        works = []
        for prompt, own in zip(prompts, pages, strict=True):
            rows = prompt[start : start + chunk]
            works.append(Work(rows, start, own[: -(-(start + len(rows)) // engine.pool.block_tokens)]))
        for i in range(0, len(works), together):
            engine.run_now(works[i : i + together])
