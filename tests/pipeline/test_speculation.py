"""Guessed tokens change nothing that a reader sees, wherever a job ends, pauses or changes hands."""

import asyncio
import random
from typing import Any

import pytest

from schemas.events import Done, Token
from schemas.subjects import Stage
from services.decode import generation
from tests.engine.requests import CheapRows, GuessCount, KnowingDrafter
from tests.gateway.tiny_model import EOS
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import Answer, LocalPipeline
from tests.pipeline.second_worker import second_worker
from tests.text.random_schemas import json_format

NUM_TOKENS = 150
PROMPT = list(range(30, 47))
A_LIST = json_format({"type": "array", "items": {"enum": ["yes", "no", 3]}, "minItems": 100})
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.2, "top_p": 0.95},
    "two choices": {"temperature": 0.3, "n": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.05, "presence_penalty": -0.5, "frequency_penalty": 0.01},
    "end token": {"temperature": 0.7, "logit_bias": {EOS: 5.0}},
    "logprobs": {"temperature": 0.2, "logprobs": 3, "logit_bias": {100: 2.0}},
    "a grammar": {"temperature": 0.3, "ignore_eos": False, "response_format": A_LIST},
    "two grammars": {"n": 2, "logprobs": 2, "frequency_penalty": 0.1, "ignore_eos": False, "response_format": A_LIST},
}


def job_of(kind: str) -> dict[str, Any]:
    return {"max_tokens": NUM_TOKENS, "seed": 5, "ignore_eos": True, "prompt_token_ids": PROMPT, **KINDS[kind]}


class Guesses(GuessCount):
    """Makes workers guess what `answers` say, right mostly, and counts what came of it in one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[Answer]) -> None:
        super().__init__()
        self._chance = random.Random(1)
        self._truths = [PROMPT + answer.token_ids(choice) for answer in answers for choice in range(2)]
        monkeypatch.setattr(generation, "Drafter", lambda tokens: KnowingDrafter(tokens, self._truths, self._chance))

    def count(self, pipeline: LocalPipeline) -> None:
        engine = pipeline.decode.engine
        engine.step_cost = CheapRows(1e-9)
        self.watch(engine)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_stream_is_the_same(tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with tiny_pipelines(scheduler={"speculate": "off"}) as pipeline:
        plain = await pipeline.ask(**job_of(kind))
    async with tiny_pipelines() as pipeline:
        guesses = Guesses(monkeypatch, [plain])
        guesses.count(pipeline)
        guessed = await pipeline.ask(**job_of(kind))
        assert guesses.num_accepted > NUM_TOKENS // 3
        # Wrong guesses are the token 3, which no list of these answers has: those are not even computed. Of two choices
        # one may be taken for the other.
        assert kind == "two grammars" or bool(guesses.num_refused) == (kind != "a grammar")
    assert guessed.essence == plain.essence
    assert isinstance(guessed.end, Done)
    indices = [event.index for event in guessed.events if isinstance(event, Token) and event.choice == 0]
    assert indices == list(range(NUM_TOKENS))


async def test_what_a_schema_forces_is_computed_with_the_token_before_it(
    tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is guessed: every one comes true, and the stream is that of a step a token."""
    things = {"type": "object", "properties": {"number": {"type": "boolean"}}, "required": ["number"]}
    schema = {"type": "array", "items": {**things, "additionalProperties": False}, "minItems": 3, "maxItems": 3}
    job = {"prompt": "x", "seed": 5, "max_tokens": 100, "n": 2, "response_format": json_format(schema)}
    async with tiny_pipelines(scheduler={"speculate": "off"}) as pipeline:
        plain = await pipeline.ask(**job)
    async with tiny_pipelines() as pipeline:
        guesses = Guesses(monkeypatch, [])
        monkeypatch.setattr(KnowingDrafter, "chances", lambda self, count: [])
        guesses.count(pipeline)
        answer = await pipeline.ask(**job)
    assert answer.essence == plain.essence and isinstance(answer.end, Done)
    assert guesses.num_accepted > answer.end.usage.completion_tokens // 2 and not guesses.num_refused


async def test_ends_inside_a_run(tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    """By length and stop string, at every one of the places in a row that a run may be cut."""
    async with tiny_pipelines(scheduler={"speculate": "off"}) as pipeline:
        whole = await pipeline.ask(**job_of("greedy"))
        ends = [job_of("greedy") | {"max_tokens": length} for length in range(60, 70)]
        texts = [event.text for event in whole.events if isinstance(event, Token)]
        ends += [job_of("greedy") | {"stop": ["".join(texts[at : at + 3])]} for at in range(70, 80)]
        plain = await pipeline.ask_all(ends)
    async with tiny_pipelines() as pipeline:
        guesses = Guesses(monkeypatch, [whole])
        guesses.count(pipeline)
        guessed = await pipeline.ask_all(ends)
        assert guesses.num_accepted > 100
    assert [answer.essence for answer in guessed] == [answer.essence for answer in plain]
    assert {answer.finish().reason for answer in guessed} == {"length", "stop"}


async def test_an_end_token_inside_a_run(tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was guessed goes on behind it, and would come true; nothing of that is sent, counted or kept."""
    beyond = [job_of("end token") | {"seed": seed} for seed in range(12)]
    jobs = [job | {"ignore_eos": False} for job in beyond]
    async with tiny_pipelines(scheduler={"speculate": "off"}) as pipeline:
        whole = await pipeline.ask_all(beyond)
        plain = await pipeline.ask_all(jobs)
    async with tiny_pipelines() as pipeline:
        guesses = Guesses(monkeypatch, whole)
        guesses.count(pipeline)
        guessed = await pipeline.ask_all(jobs)
        assert sum(EOS in run[:-1] for run in guesses.runs) > 2, "with tokens behind it that came true"
    assert [answer.essence for answer in guessed] == [answer.essence for answer in plain]
    assert [answer.end.usage for answer in guessed] == [answer.end.usage for answer in plain]
    for answer, longer in zip(guessed, whole, strict=True):
        ids = longer.token_ids()
        end = ids.index(EOS)
        assert answer.finish().reason == "stop" and answer.token_ids() == ids[: end + 1]


async def test_handed_back_in_the_middle(tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job_of(kind) | {"max_tokens": 400} for kind in ("greedy", "sampled", "penalties")]
    async with tiny_pipelines(scheduler={"speculate": "off"}) as pipeline:
        plain = await pipeline.ask_all(jobs)
    async with tiny_pipelines() as pipeline:
        guesses = Guesses(monkeypatch, plain)
        guesses.count(pipeline)
        names = [await pipeline.submit(**job) for job in jobs]
        while guesses.num_accepted < 100:
            await asyncio.sleep(0)
        async with second_worker(pipeline, Stage.DECODE):
            pipeline.decode_worker.role.hand_back()
            guessed = [await pipeline.read(name) for name in names]
    assert [answer.essence for answer in guessed] == [answer.essence for answer in plain]
