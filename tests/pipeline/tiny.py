"""A model of random weights whose steps take a few milliseconds: for tests of what happens between workers."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from services.engine.arithmetic import choose_arithmetic
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.engine.reference_model import ReferenceModel
from services.models.files import ModelFiles
from services.text.model import TextModel
from tests.gateway.tiny_model import EOS, tiny_text

SLUG = "tiny"
CONTEXT_TOKENS = 1024
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 2, 48, 80, 6, 2, 16


@cache
def tiny_files() -> ModelFiles:
    folder = Path(mkdtemp(prefix="kvrelay-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    vocab_size = tiny_pipeline_text().vocab_size
    save_file(_weights(vocab_size), folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    return ModelFiles(
        name=SLUG,
        slug=SLUG,
        path=folder,
        config=config,
        fingerprint=b"tinytiny",
        tokenizer_hash=b"onebyte-",
        context_tokens=CONTEXT_TOKENS,
        vocab_size=vocab_size,
        eos_ids=(EOS,),
        weights=(folder / "model.safetensors",),
    )


def tiny_pipeline_text() -> TextModel:
    return msgspec.structs.replace(tiny_text(SLUG), context_tokens=CONTEXT_TOKENS)


@cache
def tiny_models() -> tuple[Model, Model, Model]:
    """Of prefill, of decode, and of another decode worker."""
    torch.set_num_threads(1)
    files = tiny_files()
    arithmetic = choose_arithmetic(ModelConfig.from_hf(files.config), "bfloat16")
    return ReferenceModel(files, arithmetic), ReferenceModel(files, arithmetic), ReferenceModel(files, arithmetic)


@cache
def tiny_model(dtype: str) -> Model:
    """For mixed builds: a model for each arithmetic."""
    torch.set_num_threads(1)
    files = tiny_files()
    return ReferenceModel(files, choose_arithmetic(ModelConfig.from_hf(files.config), dtype))


def _weights(vocab_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(vocab_size, HIDDEN), "model.norm.weight": 1 + random(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1 + random(HIDDEN)
    return weights
