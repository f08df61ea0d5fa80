"""What a config means to the kernels, and weights that do not fit it."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from kernels.rope_scaling import RopeScaling
from schemas.errors import SetupError
from services.engine.model_config import ModelConfig
from services.models.family import FAMILIES
from tests.model.tiny import SIZES, load, save_tiny

BASE: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}


def test_both_spellings_of_rope() -> None:
    old = ModelConfig.from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = ModelConfig.from_hf({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert old == new and new.rope_theta == 5e5 and new.rope_scaling == RopeScaling("linear", 2.0)


def test_what_a_config_leaves_out_is_what_its_family_says() -> None:
    bare = {key: value for key, value in BASE.items() if key not in ("num_key_value_heads", "head_dim", "rms_norm_eps")}
    bare |= {"sliding_window": None, "num_attention_heads": 32, "hidden_size": 1024}
    found = {kind: ModelConfig.from_hf({**bare, "model_type": kind}) for kind in FAMILIES}
    assert {
        kind: (config.num_kv_heads, config.head_dim, config.norm_eps, config.head_norms, config.fused)
        for kind, config in found.items()
    } == {
        "llama": (32, 32, 1e-6, False, False),
        "mistral": (8, 32, 1e-6, False, False),
        "phi3": (32, 32, 1e-5, False, True),
        "qwen2": (32, 32, 1e-6, False, False),
        "qwen3": (32, 128, 1e-6, True, False),
    }


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    files, oracle = save_tiny(tmp_path)
    tensors = dict(oracle.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, files.weights[0])
    with pytest.raises(SetupError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(files, "float32")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.gate_proj.weight"][:3].clone()
    save_file(tensors, files.weights[0])
    with pytest.raises(SetupError, match=r"up_proj\.weight is \[3, 48\].*\[80, 48\]"):
        load(files, "float32")
    files.weights[0].write_bytes(b"not safetensors")
    with pytest.raises(SetupError, match="cannot read the weights"):
        load(files, "float32")
