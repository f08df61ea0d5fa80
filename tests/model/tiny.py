"""Small random Llama models, made and saved by `transformers`, and the default model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from services.engine.arithmetic import choose_arithmetic
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
}


@dataclass(frozen=True)
class TinyFiles:
    config: dict[str, Any]
    weights: tuple[Path, ...]


def save_tiny(folder: Path, shards: int = 1, **settings: Any) -> tuple[TinyFiles, LlamaForCausalLM]:
    """The model's files in `folder`, and the `transformers` model they came from."""
    torch.manual_seed(5)
    config = LlamaConfig(**{**SIZES, **settings})
    model = LlamaForCausalLM(config)
    model.eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    tensors = [
        (name, tensor)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    ]
    paths = []
    for shard in range(shards):
        paths.append(folder / f"model-{shard}.safetensors")
        save_file(dict(tensors[shard::shards]), paths[-1])
    return TinyFiles(config.to_dict(), tuple(paths)), model


def load(files: Any, dtype: str) -> Model:
    return Model(files, choose_arithmetic(ModelConfig.from_hf(files.config), dtype))
