"""GGUF files of a few kilobytes, written by the `gguf` package, with one tensor of each type that is supported."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from services.text.token_bytes import byte_level_bytes

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 96, 4, 2, 2, 128
HEAD_DIM = HIDDEN // HEADS
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LAYER_TYPES = {
    "attn_q": Type.Q4_0,
    "attn_k": Type.Q4_1,
    "attn_v": Type.Q8_0,
    "attn_output": Type.F16,
    "ffn_gate": Type.BF16,
    "ffn_up": Type.F32,
    "ffn_down": Type.Q8_0,
}


def vocabulary() -> list[str]:
    alphabet = sorted((chr(code) for code in range(0x21, 0x144)), key=byte_level_bytes)
    return [*CONTROL, *(char for char in alphabet if len(byte_level_bytes(char)) == 1), "he", "ll", "hell", "hello"]


def write_gguf(path: Path, *, metadata: dict[str, Any] | None = None, tied: bool = False, seed: int = 0) -> Path:
    """`metadata`: integers and strings that replace or join the usual ones."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, metadata or {})
    for name, (values, kind) in tensors(tied, seed).items():
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(tied: bool, seed: int) -> dict[str, tuple[np.ndarray[Any, Any], Type]]:
    random = np.random.default_rng(seed)
    num_tokens, kv_rows = len(vocabulary()), KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv_rows, HIDDEN),
        "attn_v": (kv_rows, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    plan = {"token_embd.weight": ((num_tokens, HIDDEN), Type.Q8_0), "output_norm.weight": ((HIDDEN,), Type.F32)}
    if not tied:
        plan["output.weight"] = ((num_tokens, HIDDEN), Type.Q4_0)
    for layer in range(LAYERS):
        plan |= {f"blk.{layer}.{name}.weight": (shape, LAYER_TYPES[name]) for name, shape in shapes.items()}
        plan |= {f"blk.{layer}.{name}.weight": ((HIDDEN,), Type.F32) for name in ("attn_norm", "ffn_norm")}
    return {name: (random.standard_normal(shape, np.float32), kind) for name, (shape, kind) in plan.items()}


def _write_metadata(writer: gguf.GGUFWriter, extra: dict[str, Any]) -> None:
    numbers = {
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    texts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": TEMPLATE}
    for key, value in {**numbers, **texts, **extra}.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", vocabulary())
    writer.add_array("tokenizer.ggml.token_type", [3] * len(CONTROL) + [1] * (len(vocabulary()) - len(CONTROL)))
    writer.add_array("tokenizer.ggml.merges", MERGES)
