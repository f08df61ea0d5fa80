"""Which arithmetic this machine uses for a dtype: the defined one, or the first recipe that proves exact here."""

import hashlib
from collections.abc import Sequence

import torch

from kernels import int8_arithmetic
from kernels.arithmetic import Arithmetic, Shapes
from kernels.exactness import try_out
from kernels.int8_arithmetic import Int8Arithmetic
from kernels.linear import LinearRecipe, NativeBfloat16, PackedFloat32, PaddedFloat32
from kernels.quantise import LEVELS
from kernels.torch_arithmetic import TorchArithmetic

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Of the arithmetics by a library's products."""

NAMES = (int8_arithmetic.NAME, *DTYPES)


class NoExactArithmetic(ArithmeticError):
    """Every recipe gave rows that depend on other rows or on the threads; the message lists where."""


Recipes = tuple[LinearRecipe, LinearRecipe]
"""For the layers, for the head."""


def choose(
    dtype: str, shapes: Shapes, recipes: Sequence[Recipes] | None = None, quantisation: str = "none"
) -> Arithmetic:
    """The arithmetic for a model of `shapes`, tried out first unless it is defined bit by bit (under a second).

    Raises `ValueError` for an unknown dtype or quantisation, and `NoExactArithmetic`. `recipes` replaces the list of
    this machine.
    """
    if dtype not in NAMES:
        raise ValueError(f"dtype {dtype!r} is unknown: choose one of {', '.join(NAMES)}")
    if quantisation not in ("none", *LEVELS):
        raise ValueError(f"quantisation {quantisation!r} is unknown: choose one of none, {', '.join(LEVELS)}")
    if dtype == int8_arithmetic.NAME:
        return Int8Arithmetic(quantisation)
    refused = []
    for layers, head in recipes_for(dtype) if recipes is None else recipes:
        verdict = try_out(layers, head, shapes, DTYPES[dtype])
        name = _name(dtype, layers, head, quantisation)
        if not verdict.faults:
            id = _arithmetic_id(name, verdict.digest)
            return TorchArithmetic(name, id, DTYPES[dtype], layers, head, quantisation)
        refused.append(f"{name} ({'; '.join(verdict.faults[:4])})")
    raise NoExactArithmetic(f"no exact way to multiply found on this machine: {', '.join(refused)}")


def recall(dtype: str, name: str, id: bytes, quantisation: str = "none") -> Arithmetic | None:
    """What `choose` found before on this machine, by its name and id. None: no recipe has that name here."""
    if dtype == int8_arithmetic.NAME:
        defined = Int8Arithmetic(quantisation)
        return defined if (defined.name, defined.id) == (name, id) else None
    for layers, head in recipes_for(dtype):
        if name == _name(dtype, layers, head, quantisation):
            return TorchArithmetic(name, id, DTYPES[dtype], layers, head, quantisation)
    return None


def recipes_for(dtype: str) -> list[Recipes]:
    """Fastest first. bfloat16 products are only used where the machine has tiles for them (AMX): AVX512_BF16 takes
    1.6 times as long as float32 for 256 rows, and AVX2 emulates them row by row (34 ms instead of 4), see 0001."""
    packed = [PackedFloat32(min_rows) for min_rows in (1, 2, 8)] if _has_onednn() else []
    float32: list[LinearRecipe] = [*packed, PaddedFloat32()]
    same: list[Recipes] = [(recipe, recipe) for recipe in float32]
    if dtype == "bfloat16" and torch.cpu._is_amx_tile_supported():
        return [(NativeBfloat16(), head) for head in float32] + same
    return same


def _name(dtype: str, layers: LinearRecipe, head: LinearRecipe, quantisation: str) -> str:
    stored = "" if quantisation == "none" else f".{quantisation}"
    return f"{dtype}.{layers.name}.{head.name}.{instruction_set()}{stored}"


def instruction_set() -> str:
    """torch's own class of this machine: "AVX2", "AVX512", "DEFAULT", ..."""
    return torch.backends.cpu.get_cpu_capability()


def _has_onednn() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _arithmetic_id(name: str, digest: bytes) -> bytes:
    """Bits are promised within one version of torch, so it is part of the id."""
    canonical = b"\0".join([name.encode(), torch.__version__.encode(), digest])
    return hashlib.blake2b(canonical, digest_size=8).digest()
