"""Every recipe gives a row the same bits whatever is beside it, and the right product."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.dispatch import DTYPES, choose
from kernels.exactness import inexact_rows, pattern, threads
from kernels.linear import LinearRecipe, NativeBfloat16, PackedFloat32, PaddedFloat32, few_counts
from tests.kernels.shapes import DEFAULT_MODEL, SMALL

RECIPES = [PackedFloat32(), PackedFloat32(min_rows=2), PaddedFloat32(), NativeBfloat16()]
MANY_ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 200)


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> LinearRecipe:
    chosen: LinearRecipe = request.param
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_chosen_recipe_is_exact_for_more_rows_than_were_tried(dtype: str) -> None:
    arithmetic = choose(dtype, DEFAULT_MODEL)
    for number, (outputs, inputs) in enumerate([*DEFAULT_MODEL.linears, (1024, DEFAULT_MODEL.head[1])]):
        product = arithmetic.linear([pattern((outputs, inputs), number)])
        with threads(2):
            assert inexact_rows(product, pattern((200, inputs), 100 + number), MANY_ROWS) == []


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 90), rows=st.integers(1, 70))
def test_any_window_of_rows(start: int, rows: int) -> None:
    linear = choose("float32", SMALL).linear([pattern((192, 48), 3)])
    x = pattern((160, 48), 4)
    assert torch.equal(linear(x[start : start + rows]), linear(x)[start : start + rows])


def test_product_and_bias(recipe: LinearRecipe) -> None:
    weight = pattern((40, 48), 5).to(torch.bfloat16).float()
    bias = pattern((40,), 6).to(torch.bfloat16).float()
    x = pattern((7, 48), 7).to(torch.bfloat16).float()
    expected = (x.double() @ weight.double().T + bias).float()
    tolerance = 2e-2 if isinstance(recipe, NativeBfloat16) else 1e-5
    torch.testing.assert_close(recipe.pack(weight, bias)(x), expected, atol=tolerance, rtol=tolerance)


def test_no_rows(recipe: LinearRecipe) -> None:
    assert recipe.pack(pattern((40, 48), 5))(torch.empty(0, 48)).shape == (0, 40)


def test_few_counts_hold_any_number_of_rows() -> None:
    asked = {rows: few_counts(rows) for rows in range(1, 1025)}
    assert all(rows <= count <= max(rows, 1.5 * rows) for rows, count in asked.items())
    assert all(few_counts(count) == count for count in asked.values())
    assert len(set(asked.values())) <= 50
    assert {1, 2, 16, 64, 128, 256, 512, 1024} <= set(asked.values()), "full chunks and small batches pay nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_row_counts_that_were_never_seen_cost_no_memory() -> None:
    """oneDNN keeps 0.3 to 0.6 MB for each count of rows that it is asked for."""
    linear = PackedFloat32(min_rows=2).pack(pattern((576, 1536), 5))
    x = pattern((300, 1536), 6)
    for rows in sorted({few_counts(rows) for rows in range(1, 301)}):
        linear(x[:rows])
    before = anonymous_bytes()
    for rows in range(1, 301):
        linear(x[:rows])
    assert anonymous_bytes() - before < 15_000_000


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
