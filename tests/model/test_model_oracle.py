"""Logits against `transformers` in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.check import logit_bound
from services.engine.model import Span
from tests.model.tiny import load, save_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, untied": {},
    "tied": {"tie_word_embeddings": True},
    "one head for each": {"num_key_value_heads": 6},
    "one for all": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "wide heads": {"head_dim": 32},
    "two files": {"shards": 2},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_tiny_models(settings: dict[str, Any], tmp_path: Path) -> None:
    files, oracle = save_tiny(tmp_path, **settings)
    model = load(files, "float32")
    ids = torch.arange(150) * 7 % 160
    logits = model.forward(ids, [Span(0, 150, [0, 1, 2])], model.new_pool(3, 64), None)
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0]
    assert expected.abs().max() > 3  # a model whose logits are all alike would prove nothing
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model(dtype: str, default_models: Any, default_oracle: Any) -> None:
    """Every row of 200 tokens from all over the vocabulary."""
    model = default_models(dtype)
    ids = (torch.arange(200) * 7919 + 5) % 49152
    logits = model.forward(ids, [Span(0, 200, range(4))], model.new_pool(4, 64), None)
    with torch.no_grad():
        expected = default_oracle(ids[None]).logits[0]
    assert (logits - expected).abs().max() <= logit_bound(model.arithmetic)
