"""Small random models, made and saved by `transformers`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.engine.arithmetic import choose_arithmetic
from services.engine.loading import load_model
from services.engine.model import Model
from services.engine.model_config import ModelConfig

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class TinyFiles:
    config: dict[str, Any]
    weights: tuple[Path, ...]


def save_tiny(folder: Path, shards: int = 1, kind: str = "llama", **settings: Any) -> tuple[TinyFiles, PreTrainedModel]:
    """The model's files in `folder`, and the `transformers` model they came from."""
    model = tiny_model(kind, **settings)
    tensors = [
        (name, tensor)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    ]
    paths = []
    for shard in range(shards):
        paths.append(folder / f"model-{shard}.safetensors")
        save_file(dict(tensors[shard::shards]), paths[-1])
    return TinyFiles(model.config.to_dict(), tuple(paths)), model


def tiny_model(kind: str = "llama", **settings: Any) -> PreTrainedModel:
    """With norms and biases that are not one and zero."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings}))
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


def load(files: Any, dtype: str) -> Model:
    return load_model(files, choose_arithmetic(ModelConfig.from_hf(files.config), dtype))
