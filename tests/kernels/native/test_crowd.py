"""Threads that only wait for one another are not used; those that gain something are, and the bits stay the same."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from kernels.native.crowd import FIRST_PAUSE_S, LONGEST_PAUSE_S, Crowd
from services.engine.lease import Lease
from services.engine.model import Span
from services.engine.native_model import NativeModel
from tests.engine.tiny_native import VOCAB_SIZE, tiny_native


def test_a_hiccup_is_none() -> None:
    crowd = Crowd()
    for now_s in range(10):
        crowd.note(took_s=0.01, waited_s=0.009 if now_s % 2 else 0.005, now_s=now_s)
        assert crowd.threads(2, now_s) == 2


def test_one_computes_alone_for_a_while_and_longer_each_time() -> None:
    crowd, now_s, pauses = Crowd(), 0.0, []
    crowd.note(0.01, 0.01, now_s)
    for _ in range(10):
        crowd.note(0.01, 0.01, now_s)
        began_s = now_s
        while crowd.threads(2, now_s) == 1:
            now_s += 0.05
        pauses.append(now_s - began_s)
    assert pauses == sorted(pauses) and pauses[0] < 2 * FIRST_PAUSE_S < pauses[2] < LONGEST_PAUSE_S <= pauses[-1]
    crowd.note(0.01, 0.0, now_s)
    crowd.note(0.01, 0.01, now_s)
    assert crowd.threads(2, now_s) == 2, "a good pass made up for all"
    crowd.note(0.01, 0.01, now_s)
    assert crowd.threads(2, now_s + 2 * FIRST_PAUSE_S) == 2


@pytest.fixture
def one_core() -> Iterator[int]:
    """This thread's only one."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to cores on Linux")
def test_two_threads_on_one_core_are_found_out(one_core: int) -> None:
    model = tiny_native(lent=(one_core,))
    assert isinstance(model, NativeModel)
    crowd, expected = model._decoder._crowd, None
    deadline_s = time.monotonic() + 30
    while crowd.threads(2, time.monotonic()) == 2:
        assert time.monotonic() < deadline_s
        model.use_threads(Lease(own=1, lent=1, revoked=0))
        pool = model.new_pool(1, 64)
        logits = model.forward([k % VOCAB_SIZE for k in range(60)], [Span(0, 60, [0])], pool, None)
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected)
    model.use_threads(Lease(own=1, lent=1, revoked=0))
    assert torch.equal(model.forward(list(range(60)), [Span(0, 60, [0])], pool, None), logits)
