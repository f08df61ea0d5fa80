"""Every recipe gives a row the same bits whatever is beside it, and the right product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.exactness import inexact_rows, pattern, threads
from kernels.linear import LinearRecipe, NativeBfloat16, PackedFloat32, PaddedFloat32

RECIPES = [PackedFloat32(), PaddedFloat32(), NativeBfloat16()]
SHAPES = [(960, 576), (576, 1536), (40, 48)]
MANY_ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 200)


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> LinearRecipe:
    chosen: LinearRecipe = request.param
    return chosen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_rows_or_threads(recipe: LinearRecipe, shape: tuple[int, int]) -> None:
    if isinstance(recipe, NativeBfloat16) and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("torch emulates bfloat16 products here, slowly")
    weight = pattern(shape, 1).to(torch.bfloat16).float()
    rows = pattern((200, shape[1]), 2).to(torch.bfloat16).float()
    with threads(2):
        assert inexact_rows(recipe.pack(weight), rows, MANY_ROWS) == []


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 90), rows=st.integers(1, 70))
def test_any_window_of_rows(start: int, rows: int) -> None:
    """The first recipe, which the default model uses, on windows anywhere."""
    linear = PackedFloat32().pack(pattern((192, 64), 3))
    x = pattern((160, 64), 4)
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
