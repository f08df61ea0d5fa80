"""What a model is on disk: everything that a process needs to know of one before it reads the weights."""

from pathlib import Path
from typing import Any

import msgspec

FINGERPRINT_BYTES = 8

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was found, checked and prepared. Reading one needs neither torch nor transformers.

    `path` is its folder in the cache with `config.json` (Hugging Face's form), `tokenizer.json` and
    `tokenizer_config.json` (with the chat template); `weights` are safetensors files, or one GGUF, where the user keeps
    them. `product_formats` are the GGUF's formats of all weights that are multiplied or looked up, none for
    safetensors. `fingerprint` covers the weights and the config, `tokenizer_hash` the tokenizer, its special tokens and
    the chat template: both go into every key.
    """

    name: str
    slug: str
    path: Path
    config: dict[str, Any]
    fingerprint: bytes
    tokenizer_hash: bytes
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    weights: tuple[Path, ...]
    product_formats: tuple[str, ...] = ()
    source: str = ""
