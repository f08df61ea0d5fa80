"""A decode worker that takes over goes on with the very stream, and says so when it would not have begun it so."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kernels.sampling import Row
from schemas.events import Done, Event, Token
from services import telemetry
from services.engine.model import Model
from services.engine.recheck import Recheck
from services.engine.reference_model import ReferenceModel
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import DECODE_CLAIM, PREFILL_CLAIM, continued, handoff_of, leave, leave_to_prefill
from tests.pipeline.tiny import tiny_files, tiny_models
from tests.text.random_schemas import json_format

ALARM = "two workers disagree about a token"
NUM_TOKENS = 40
PROMPT = list(range(3, 20))  # blocks of 16: a full one and one token
A_LIST = json_format({"type": "array", "items": {"enum": ["yes", "no", 3]}, "minItems": 100})
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"top_p": 0.95},
    "two choices": {"n": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "min_p": 0.02},
    "logprobs": {"logprobs": 3, "logit_bias": {100: 2.0}},
    "a grammar": {"ignore_eos": False, "response_format": A_LIST},
    "two grammars": {"n": 2, "logprobs": 2, "presence_penalty": 0.1, "ignore_eos": False, "response_format": A_LIST},
    "stop strings": {"temperature": 0.0, "stop": ["\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"]},
}


class Alarms:
    """What was logged and what was counted; `num_compared` tells whether there could have been any."""

    def __init__(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_compared = 0
        self.num_counted = 0.0
        self._caplog = caplog
        monkeypatch.setattr(telemetry.disagreements, "_add", self._count)
        compare = Recheck.compare

        def compared(recheck: Recheck, position: int, logits: Row) -> None:
            self.num_compared += 1
            compare(recheck, position, logits)

        monkeypatch.setattr(Recheck, "compare", compared)

    def _count(self, value: float, attributes: Any) -> None:
        self.num_counted += value

    @property
    def logged(self) -> list[dict[str, Any]]:
        return [record.fields for record in self._caplog.records if record.getMessage() == ALARM]  # type: ignore[attr-defined]


@pytest.fixture
def alarms(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarms]:
    with caplog.at_level(logging.ERROR):
        yield Alarms(caplog, monkeypatch)


def job_of(kind: str) -> dict[str, Any]:
    return {"max_tokens": NUM_TOKENS, "seed": 5, "ignore_eos": True, "prompt_token_ids": PROMPT, **KINDS[kind]}


def cuts(events: list[Event], num_choices: int) -> list[int]:
    """How many events there were at the crash: in the first block, about its end, and at the very end."""
    first = 1 + num_choices
    whole = len(events) - 1  # all but `done`
    some = {first, first + 1, first + 2, first + 13, first + 14, first + 15, first + 16, first + 28, whole - 1, whole}
    return sorted(cut for cut in some if first <= cut <= whole)


@pytest.mark.parametrize("kind", KINDS)
async def test_taken_over_anywhere(tiny_pipelines: Pipelines, alarms: Alarms, kind: str):
    """With the blocks that the dead worker stored, and without any: then prefill makes them again, or decode does."""
    async with tiny_pipelines() as pipeline:
        job = job_of(kind)
        whole = await pipeline.ask(**job)
        places = cuts(whole.events, job.get("n", 1))
        stores: list[dict[str, Any]] = [{}, {"salt": "lost"}, {"salt": "never stored", "stored_blocks": 0}]
        for change in stores:
            runs = (continued(pipeline, job, whole.events[:cut], **change) for cut in places)
            for answer in await asyncio.gather(*runs):
                assert answer.essence == whole.essence
                assert isinstance(answer.end, Done) and answer.end.usage == whole.end.usage
    assert alarms.num_compared >= 2 * len(places)
    assert alarms.logged == [] and alarms.num_counted == 0


async def test_a_whole_hit_still_compares_a_token(tiny_pipelines: Pipelines, alarms: Alarms):
    """Wherever the known tokens end in a block. The worker before this one stored all of its rows, as at a drain."""
    job = job_of("sampled")
    async with tiny_pipelines() as pipeline:
        whole = await pipeline.ask(**job)
        for cut in range(3, 20):
            known = PROMPT + whole.token_ids()[: cut - 1]
            await pipeline.ask(prompt_token_ids=known[:-1], max_tokens=1)  # stores full blocks and the partial one
            before = alarms.num_compared
            assert (await continued(pipeline, job, whole.events[:cut])).essence == whole.essence
            num_rows = alarms.num_compared - before
            assert num_rows == (16 if len(known) % 16 == 1 else 1)
    assert alarms.logged == []


async def test_a_wrong_token_is_told_and_stays(tiny_pipelines: Pipelines, alarms: Alarms):
    """A worker that computes otherwise published it; whoever takes over goes on behind it, as the reader does."""
    job = job_of("sampled")
    async with tiny_pipelines() as pipeline:
        whole = await pipeline.ask(**job)
        wrong = msgspec.structs.replace(whole.events[7], id=200)
        assert isinstance(wrong, Token) and wrong.index == 6
        events = [*whole.events[:7], wrong, *whole.events[8:11]]
        handoff = handoff_of(pipeline, job, events)
        answer = await pipeline.read(await leave(pipeline, handoff, events))
        assert answer.token_ids()[:10] == [*whole.token_ids()[:6], 200, *whole.token_ids()[7:10]]
        assert len(answer.token_ids()) == NUM_TOKENS and isinstance(answer.end, Done)
    told = alarms.logged
    first = told[0]
    assert (first["job"], first["index"], first["published"]) == (handoff.job, 6, 200)
    assert first["computed"] == whole.token_ids()[6] and alarms.num_counted == len(told)
    assert (first["published_by"], first["computed_by"]) == (DECODE_CLAIM, "decode.1.1")


async def test_a_worker_with_other_weights_is_found_out(tiny_pipelines: Pipelines, alarms: Alarms):
    """Everything before the crash is right, and this worker would have said something else."""
    job = job_of("greedy")
    async with tiny_pipelines() as pipeline:
        whole = await pipeline.ask(**job)
    async with tiny_pipelines(decode_model=other_weights()) as pipeline:
        answer = await continued(pipeline, job, whole.events[:20], salt="apart", stored_blocks=0)
        assert answer.token_ids()[:19] == whole.token_ids()[:19] and len(answer.token_ids()) == NUM_TOKENS
    assert {alarm["published_by"] for alarm in alarms.logged} == {DECODE_CLAIM}
    assert len(alarms.logged) > 5


async def test_a_first_token_is_compared_by_the_prefill_worker_that_takes_over(
    tiny_pipelines: Pipelines, alarms: Alarms
):
    job = job_of("two choices") | {"max_tokens": 3}
    async with tiny_pipelines() as pipeline:
        whole = await pipeline.ask(**job)
        start, first, second = whole.events[:3]
        wrong = msgspec.structs.replace(second, id=200)
        for number, events in enumerate(([start], [start, first], [start, first, second], [start, first, wrong])):
            answer = await pipeline.read(await leave_to_prefill(pipeline, job, events))
            assert answer.events[1 : len(events)] == events[1:] and isinstance(answer.end, Done)
            assert number == 3 or answer.essence == whole.essence
    alarm, *_ = alarms.logged  # another comes if its claim is lost to a pause of the machine
    assert (alarm["choice"], alarm["index"], alarm["published"]) == (1, 0, 200)
    assert (alarm["published_by"], alarm["computed_by"]) == (PREFILL_CLAIM, "prefill.0.1")


def other_weights() -> Model:
    model = ReferenceModel(tiny_files(), tiny_models()[1].arithmetic)
    model._weights.norm.neg_()
    return model
