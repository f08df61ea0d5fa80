"""Models whose forward pass this is not, or whose KV cannot be cut, are refused with the setting named."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from kernels.reference.rope import RopeScaling
from schemas.errors import SetupError
from services.engine.model_config import ModelConfig
from tests.model.tiny import SIZES, load, save_tiny

BASE: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_size": 50}, "multiples of 16"),
    ],
)
def test_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        ModelConfig.from_hf({**BASE, **settings})


def test_both_spellings_of_rope() -> None:
    old = ModelConfig.from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = ModelConfig.from_hf({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert old == new and new.rope_theta == 5e5 and new.rope_scaling == RopeScaling("linear", 2.0)


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
