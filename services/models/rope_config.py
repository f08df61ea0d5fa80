"""The rotations that a Hugging Face config asks for, as `transformers` reads it (modeling_rope_utils)."""

import math
from collections.abc import Mapping
from typing import Any

from kernels.rope_scaling import RopeScaling
from schemas.errors import SetupError
from services.models.refusal import unsupported

_PARTIAL = "partial_rotary_factor"


def rope_of(config: Mapping[str, Any], types: tuple[str, ...] | None, where: str) -> tuple[float, RopeScaling]:
    """Base and scaling. `types`: what the family may have, None for any.

    Raises `SetupError` for rotations that depend on the prompt's length, and for ones that we do not compute.
    """
    # transformers 5 writes rope_parameters with the base in it, earlier versions rope_scaling and the base beside it.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise SetupError(f"{where}: {name} must be an object, got {rope!r:.80}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise unsupported(where, f"{name}.{nested[0]}", rope[nested[0]], "layers that rotate differently")
    for setting, values in ((f"{name}.{_PARTIAL}", rope), (_PARTIAL, config)):
        if (values.get(_PARTIAL) or 1) != 1:
            raise unsupported(where, setting, values[_PARTIAL], "partial rotation")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCALINGS:
        raise unsupported(where, f"{name}.rope_type", kind, "rotary embeddings that depend on the prompt's length")
    if types is not None and kind not in types:
        raise unsupported(where, f"{name}.rope_type", kind, "a scaling that its family does not have")
    if types and kind != "default":
        kind = "longrope"
    numbers = _Numbers({"rope_theta": config.get("rope_theta") or 10000.0, **rope}, config, f"{where}: {name}")
    return numbers.get("rope_theta"), _SCALINGS[kind](numbers)


class _Numbers:
    """The settings of a scaling, each checked when it is asked for."""

    def __init__(self, rope: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
        self._rope = rope
        self.where = where
        self.context: int = config["max_position_embeddings"]
        self._original = config.get("original_max_position_embeddings")

    def has(self, key: str) -> bool:
        return self._rope.get(key) is not None

    def get(self, key: str, default: float | None = None) -> float:
        """Above zero. Raises `SetupError` for what is missing and has no default, or is no such number."""
        value = self._rope.get(key)
        return _positive(default if value is None else value, f"{self.where}.{key}")

    def list_of(self, key: str) -> tuple[float, ...]:
        values = self._rope.get(key)
        if not isinstance(values, list) or not values:
            raise SetupError(f"{self.where}.{key} must be a list of numbers, got {values!r:.80}")
        return tuple(_positive(value, f"{self.where}.{key}") for value in values)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._rope.get(key, default))

    @property
    def original_context(self) -> int:
        """Outside the scaling's own settings it counts more, as in `transformers`."""
        key = "original_max_position_embeddings"
        return int(_positive(self._original or self._rope.get(key) or self.context, f"{self.where}.{key}"))


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SetupError(f"{name} must be a number above zero, got {value!r:.80}")
    return float(value)


def _llama3(numbers: _Numbers) -> RopeScaling:
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    if low == high:
        raise SetupError(f"{numbers.where}: low_freq_factor and high_freq_factor must differ, both are {low}")
    return RopeScaling("llama3", numbers.get("factor"), low, high, numbers.original_context)


def _yarn(numbers: _Numbers) -> RopeScaling:
    factor = numbers.get("factor", numbers.context / numbers.original_context)
    if numbers.has("attention_factor"):
        attention_factor = numbers.get("attention_factor")
    elif numbers.has("mscale") and numbers.has("mscale_all_dim"):
        attention_factor = _mscale(factor, numbers.get("mscale")) / _mscale(factor, numbers.get("mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=numbers.original_context,
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=numbers.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(numbers: _Numbers) -> RopeScaling:
    """It changes from its short factors to its long ones with the prompt's length: KV can be cut only where both are
    the same, as in configs that we make of a GGUF's list of factors."""
    short, long = numbers.list_of("short_factor"), numbers.list_of("long_factor")
    if short != long:
        raise unsupported(
            numbers.where, "rope_type", "longrope", "rotary embeddings that depend on the prompt's length"
        )
    factor = numbers.get("factor", numbers.context / numbers.original_context)
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(numbers.original_context))
    return RopeScaling("factors", factors=short, attention_factor=numbers.get("attention_factor", grown))


_SCALINGS = {
    "default": lambda numbers: RopeScaling(),
    "linear": lambda numbers: RopeScaling("linear", numbers.get("factor")),
    "ntk": lambda numbers: RopeScaling("ntk", numbers.get("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
