"""What a grammar allows is known before a token is drawn, whether it is found out beside the pass or before it."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kernels.native.gate import DrawGate
from kernels.reference.sampling import Draw
from schemas.errors import GrammarFailed
from schemas.job import Sampling
from schemas.response_format import JsonSchema, NamedSchema
from services.engine import engine as engines
from services.engine.engine import Engine, Work
from services.engine.model import Model, Span
from services.engine.native_model import NativeModel
from services.engine.sampler import Sampler
from tests.engine.requests import Request, alone, grammar_of, make_pool
from tests.engine.tiny_native import VOCAB_SIZE, tiny_native
from tests.pipeline.tiny import tiny_model

A_LIST = JsonSchema(NamedSchema(schema={"type": "array", "items": {"enum": ["yes", "no", 3]}, "minItems": 100}))
MODELS: dict[str, Callable[[], Model]] = {"bfloat16": lambda: tiny_model("bfloat16"), "native int8": tiny_native}
PROMPT = [40, 50, 60, 70]


def test_a_pass_draws_when_the_gate_is_open() -> None:
    """Before that nothing is allowed, and nothing could be drawn."""
    model, gate = tiny_native(), DrawGate()
    assert isinstance(model, NativeModel)
    pool = make_pool(model, 1)
    allowed = np.zeros(VOCAB_SIZE // 32, np.uint32)
    draw = Draw(greedy=True, inv_temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, hash=0, allowed=allowed)
    call = model._call(PROMPT, [Span(0, len(PROMPT), [0])], pool.data, [len(PROMPT) - 1])
    ids, status = call.ask_draws([(0, draw)])
    finite = call.ask_finite()
    finite[:] = False
    call.draw_behind(gate)
    step = threading.Thread(target=model._run, args=(call,))
    step.start()
    while not finite.all():  # then only the logits are missing
        assert step.is_alive()
    allowed[2] = 1 << 13
    gate.open()
    step.join()
    assert ids.tolist() == [77] and status.tolist() == [0]


@pytest.mark.parametrize("kind", MODELS)
def test_the_tokens_are_the_same_with_a_core_beside_and_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for has_core in (True, False):
        monkeypatch.setattr(engines, "has_core_beside", lambda _, has_core=has_core: has_core)
        sampling = Sampling(max_tokens=40, seed=3, temperature=1.0, response_format=A_LIST)
        answers.append(alone(MODELS[kind](), Request(PROMPT, sampling)))
    assert answers[0] == answers[1]
    assert grammar_of(A_LIST).matcher().num_fitting(answers[0]) == 40


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("has_core", [True, False])
def test_a_grammar_that_fails_ends_its_own_sequence(kind: str, has_core: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "has_core_beside", lambda _: has_core)
    model = MODELS[kind]()
    samplers = [Sampler(Sampling(temperature=0.0), 1, 0, (), grammar_of(A_LIST).matcher()) for _ in range(2)]
    samplers[0].note(ord("x") + 3)  # no list begins so
    engine = Engine(model, make_pool(model, 2))
    try:
        failed, going = engine.run_now(
            [Work(PROMPT, 0, [number], [sampler]) for number, sampler in enumerate(samplers)]
        )
    finally:
        engine.close()
    assert isinstance(failed, GrammarFailed)
    assert isinstance(going, list) and going[0].id == ord("[") + 3
