"""Each family, from a folder and from a GGUF, against `transformers` in float32: prefill in chunks, then decode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from services.engine.model import Model
from tests.model import paths
from tests.model.tiny import load, save_tiny, tiny_model
from tests.model.tiny_gguf_model import llama3_factors, save_gguf

IDS = torch.arange(150) * 7 % 160
CHUNKS_THEN_STEPS = paths.Path(cuts=[64, 64, 2, *[1] * 20], mate=5)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SAME_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 4.0, 4.0, 5.0, 6.0, 8.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"kind": "qwen2"},
    "qwen2, tied": {"kind": "qwen2", "tie_word_embeddings": True},
    "qwen2, yarn": {"kind": "qwen2", "rope_parameters": YARN},
    "qwen3": {"kind": "qwen3"},
    "qwen3, wide heads, biases, tied": {
        "kind": "qwen3",
        "head_dim": 32,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "phi3": {"kind": "phi3"},
    "phi3, one head for each": {"kind": "phi3", "num_key_value_heads": 6},
    "mistral": {"kind": "mistral", "sliding_window": None},
    "mistral, a window as long as the context": {"kind": "mistral", "sliding_window": 256},
    "llama, yarn": {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    "llama, yarn with mscale": {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}},
    "llama, factors": {"rope_parameters": SAME_FACTORS},
}


@pytest.mark.parametrize("settings", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    files, oracle = save_tiny(tmp_path, **settings)
    assert_equal(load(files, "float32"), oracle)


def test_a_raised_base(tmp_path: Path) -> None:
    """What transformers has no name for, but for a base of that size."""
    raised = 10000.0 * 4.0 ** (16 / 14)
    files, oracle = save_tiny(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": raised})
    files.config["rope_parameters"] = {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0}
    assert_equal(load(files, "float32"), oracle)


# Whole blocks of 32 in every product.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GGUFS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "llama, tied, biases": ({"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
    "llama, wide heads": ({"head_dim": 32}, {}),
    "llama, linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "llama, linear as it was once written": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope.scale_linear": 2.0},
    ),
    "llama3": ({"rope_parameters": LLAMA3}, {"rope_freqs": llama3_factors(16, LLAMA3)}),
    "mistral": ({"kind": "mistral", "sliding_window": None}, {}),
    "qwen2": ({"kind": "qwen2"}, {}),
    "qwen2, yarn": (
        {"kind": "qwen2", "rope_parameters": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "qwen3": ({"kind": "qwen3", "head_dim": 32}, {}),
    "phi3": ({"kind": "phi3"}, {"rope.dimension_count": 16, "attention.sliding_window": 0}),
}


@pytest.mark.parametrize("settings", GGUFS.values(), ids=GGUFS.keys())
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_a_gguf(settings: tuple[dict[str, Any], dict[str, Any]], kind: Type, tmp_path: Path) -> None:
    model = tiny_model(**{**SIZES, **settings[0]})
    files = save_gguf(tmp_path / "tiny.gguf", model, kind, settings[1])
    assert_equal(load(files, "float32"), model)


@pytest.mark.parametrize("settings", GGUFS.values(), ids=GGUFS.keys())
def test_a_gguf_in_whole_numbers(settings: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """Off by what rounding the activations costs, measured 0.03 to 0.07; a misplaced row or bias costs over 0.5."""
    model = tiny_model(**{**SIZES, **settings[0]})
    files = save_gguf(tmp_path / "tiny.gguf", model, Type.Q4_1, settings[1])
    expected = expected_logits(model)
    error = paths.compute(load(files, "int8"), IDS, CHUNKS_THEN_STEPS)[0] - expected
    assert error.pow(2).mean().sqrt() < 0.15 * expected.pow(2).mean().sqrt()


def expected_logits(oracle: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(IDS[None]).logits[0]
    assert logits.abs().max() > 2  # a model whose logits are all alike would prove nothing
    return logits


def assert_equal(model: Model, oracle: torch.nn.Module) -> None:
    logits, _ = paths.compute(model, IDS, CHUNKS_THEN_STEPS)
    torch.testing.assert_close(logits, expected_logits(oracle), atol=1e-4, rtol=0)
