"""Each test once for every instruction set of this machine."""

from collections.abc import Iterator

import pytest

from kernels.native.library import instruction_set, use

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = instruction_set()
    if not use(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert use(before)
