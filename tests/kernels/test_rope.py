"""Rotary positions against `transformers`."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.exactness import pattern, threads
from kernels.reference.rope import RopeTable, rotate_
from kernels.rope_scaling import RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("hf", "scaling"),
    [
        ({"rope_type": "default"}, RopeScaling()),
        ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", factor=4.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
    ],
    ids=["default", "linear", "llama3"],
)
def test_like_transformers(hf: dict[str, Any], scaling: RopeScaling) -> None:
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=3, max_position_embeddings=512, rope_parameters={**hf, "rope_theta": 1e5}
    )
    positions = torch.tensor([0, 1, 17, 63, 64, 200, 511])
    queries = pattern((7, 3, 32), 1)
    cos, sin = LlamaRotaryEmbedding(config)(queries, positions[None])
    expected, _ = apply_rotary_pos_emb(queries.transpose(0, 1)[None], queries.transpose(0, 1)[None], cos, sin)
    rotate_(queries, *RopeTable(32, 512, 1e5, scaling).rows(positions))
    torch.testing.assert_close(queries, expected[0].transpose(0, 1), atol=2e-6, rtol=0)


def test_the_table_does_not_depend_on_the_threads() -> None:
    one = RopeTable(64, 3001, 1e4, RopeScaling())
    with threads(3):
        three = RopeTable(64, 3001, 1e4, RopeScaling())
    assert torch.equal(one.cos, three.cos) and torch.equal(one.sin, three.sin)
