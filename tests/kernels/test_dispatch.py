"""The probe finds what is not exact, the dispatch goes on to the next recipe, and ids tell bits apart."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import NoExactArithmetic, choose
from kernels.exactness import inexact_rows, pattern, threads, try_out
from kernels.linear import Linear, PackedFloat32
from tests.kernels.shapes import SMALL


class SumsByRows:
    """A recipe that adds in another order from 16 rows on, as matrix libraries do."""

    name = "sums-by-rows"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        half = weight.shape[1] // 2

        def linear(x: Tensor) -> Tensor:
            if x.shape[0] < 16:
                return functional.linear(x, weight)
            return functional.linear(x[:, :half], weight[:, :half]) + functional.linear(x[:, half:], weight[:, half:])

        return linear


class DependsOnPlace(PackedFloat32):
    """A recipe whose last row, alone in its vector, is rounded differently."""

    name = "depends-on-place"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        exact = super().pack(weight, bias)

        def linear(x: Tensor) -> Tensor:
            y = exact(x)
            if x.shape[0] % 2:
                y[-1] = torch.nextafter(y[-1], torch.tensor(9.0))
            return y

        return linear


@pytest.mark.parametrize("recipe", [SumsByRows(), DependsOnPlace()], ids=lambda recipe: recipe.name)
def test_an_inexact_recipe_is_found_and_passed_over(recipe: PackedFloat32) -> None:
    assert try_out(recipe, PackedFloat32(), SMALL, torch.float32).faults
    assert (
        choose(
            "float32", SMALL, [(recipe, PackedFloat32()), (PackedFloat32(min_rows=8), PackedFloat32())]
        ).layer_recipe.name
        == "packed-f32-min8"
    )


def test_nothing_exact_is_refused_by_name() -> None:
    with pytest.raises(NoExactArithmetic, match=r"sums-by-rows.*rows"):
        choose("float32", SMALL, [(SumsByRows(), PackedFloat32())])


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"float16.*bfloat16, float32"):
        choose("float16", SMALL)


def test_dependence_on_threads_is_found() -> None:
    def by_threads(x: Tensor) -> Tensor:
        return x * torch.get_num_threads()

    with threads(2):
        assert inexact_rows(by_threads, pattern((20, 4), 1)) != []


def test_the_id_is_a_function_of_the_bits() -> None:
    """The same in every process, whatever its threads; another for another dtype or another order of additions."""
    one = choose("float32", SMALL)
    with threads(2):
        again = choose("float32", SMALL)
    assert one.id == again.id and len(one.id) == 8
    assert choose("bfloat16", SMALL).id != one.id
    exact, other = (try_out(r, PackedFloat32(), SMALL, torch.float32) for r in (PackedFloat32(), SumsByRows()))
    assert exact.digest != other.digest


def test_pattern_is_the_same_everywhere() -> None:
    """A machine whose pattern differed would have another id for the same bits."""
    assert pattern((3,), 1).tolist() == [-0.24438846111297607, 0.44609248638153076, 0.8043663501739502]
    assert -1 <= pattern((10_000,), 2).min() < -0.99 and 0.99 < pattern((10_000,), 2).max() < 1
