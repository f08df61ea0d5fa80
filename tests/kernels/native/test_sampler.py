"""Sampling in C++ is the definition's, on every instruction set that this machine has."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.native import library
from kernels.native.sampler import choose
from kernels.reference import sampling
from kernels.reference.sampling import Draw
from tests.kernels.sampling_rows import draws, mask_of, row, rows

NUCLEUS = Draw(greedy=False, inv_temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, hash=2**63)


@pytest.fixture(params=["portable", "avx2", "avx512"], scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = library.instruction_set()
    if not library.use(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.use(before)


@given(scores=rows, draw=draws)
@example(scores=np.zeros(20_001, np.float32), draw=NUCLEUS._replace(top_p=1.0 - 2.0**-53, hash=2**64 - 1))
@settings(max_examples=1000, deadline=None)
def test_it_chooses_what_the_definition_chooses(isa, scores, draw):
    assert choose(scores, draw) == sampling.choose(scores, draw)


@given(scores=rows, draw=draws, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.01, 0.5, 0.99]))
@settings(max_examples=300, deadline=None)
def test_of_the_allowed_ids_it_chooses_what_the_definition_chooses(isa, scores, draw, seed, share):
    ids = set(np.flatnonzero(np.random.default_rng(seed).random(len(scores)) < share).tolist())
    masked = draw._replace(allowed=mask_of(ids, len(scores)))
    chosen = choose(scores, masked)
    assert chosen == sampling.choose(scores, masked)
    assert chosen is None or chosen in ids


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 1.0},
        {},
        {"top_k": 50},
        {"top_k": 5000, "top_p": 0.5},
        {"top_p": 1.0, "min_p": 0.05},
        {"top_p": 0.999, "min_p": 1e-4, "inv_temperature": 0.5},
    ],
)
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_rows_of_a_whole_vocabulary(isa, filters, scale):
    scores = row(int(scale), 49_152, scale)
    for chance in range(0, 2**64, 2**64 // 7):
        draw = NUCLEUS._replace(hash=chance, **filters)
        assert choose(scores, draw) == sampling.choose(scores, draw)
