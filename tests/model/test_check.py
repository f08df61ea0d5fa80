"""The self-check passes on a good model, and finds wrong weights and inexact arithmetic."""

import logging
from collections.abc import Callable

import msgspec
import pytest
import torch

from schemas.errors import SetupError
from services.engine.check import Canary, self_check
from services.engine.model import Model
from tests.models.default_model import default_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_agrees_with_its_golden(
    dtype: str, default_models: Callable[[str], Model], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert self_check(default_models(dtype), default_model()).sings()
    assert "of the golden" in caplog.text


def test_without_a_golden_only_exactness_is_checked(
    tiny_models: Callable[[str], Model], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unknown = msgspec.structs.replace(default_model(), fingerprint=bytes(8))
    self_check(tiny_models("bfloat16"), unknown)
    assert "no golden for this model" in caplog.text


def test_wrong_weights_are_found(default_models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = default_models("float32")
    layer = model._weights.layers[17]
    monkeypatch.setattr(layer.mlp_norm, "data", layer.mlp_norm * 1.001)
    with pytest.raises(SetupError, match="from what transformers computes"):
        self_check(model, default_model())


def test_inexact_arithmetic_is_found(tiny_models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models("float32")
    unknown = msgspec.structs.replace(default_model(), fingerprint=bytes(8))
    exact = model._weights.head
    monkeypatch.setattr(model, "_weights", _with_head(model, lambda x: exact(x) + 1e-6 * x.shape[0]))
    with pytest.raises(SetupError, match="depend on how its prompt was computed"):
        self_check(model, unknown)


def _with_head(model: Model, head: Callable[[torch.Tensor], torch.Tensor]) -> object:
    weights = model._weights
    return type(weights)(weights.embedding, weights.layers, weights.norm, head)


def test_a_canary_notices_a_changed_weight(tiny_models: Callable[[str], Model]) -> None:
    model = tiny_models("float32")
    canary = Canary(model, [1, 2, 3, 4, 5])
    assert canary.sings()
    norm = model._weights.norm
    kept = norm[3].clone()
    norm[3] += 1e-3
    assert not canary.sings()
    norm[3] = kept
    assert canary.sings()
