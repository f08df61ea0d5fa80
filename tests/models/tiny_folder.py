"""Hugging Face folders of a few kilobytes, written without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.text.tiny_tokenizers import byte_level

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 500,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 257,
}
TOKENIZER_CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "model_max_length": 64}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def write_folder(folder: Path, *, config: dict[str, Any] | None = None, shards: int = 1, value: float = 1.0) -> Path:
    """`value` fills the weights; with more than one shard there is an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG | (config or {}))
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "tokenizer.json").write_text(byte_level(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    if shards == 1:
        save_file({"a": np.full(8, value, np.float32)}, folder / "model.safetensors")
        return folder
    names = [f"model-{number}-of-{shards}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        save_file({f"t{number}": np.full(8, value, np.float32)}, folder / name)
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
