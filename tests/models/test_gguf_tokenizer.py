"""Tokenizers of GGUF files of each architecture: the ids that `transformers` gives, whatever way it is asked."""

import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest

from schemas.errors import SetupError
from services.models.files import TOKENIZER_FILE
from services.models.gguf_config import ARCHITECTURES, eos_ids_of
from services.models.gguf_file import read_gguf
from services.models.gguf_tokenizer import convert_tokenizer
from services.text.tokenizer import Tokenizer
from tests.models.tiny_gguf import CONTROL, MERGES, vocabulary

TEXTS = ["hello", " hello  hello", "he 2026 ll\n\n1.", "Hello, ärger 漢!", "<|im_start|>user\nhello<|im_end|>", ""]
PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
PIECES = ["▁", "h", "e", "l", "o", "2", "0", "6", "he", "ll", "▁he", "▁hell", "▁hello", "hell", "hello", "H", ",", "!"]


def byte_level() -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def sentencepiece() -> dict[str, Any]:
    control = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "model": "llama",
        "tokens": [*control, *octets, *PIECES],
        "token_type": [2, 3, 3, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "scores": [0.0] * (len(control) + 256) + [-float(rank) for rank in range(len(PIECES))],
        "bos_token_id": 1,
        "eos_token_id": 4,
        "unknown_token_id": 0,
    }


def write(path: Path, architecture: str, tokenizer: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    for name, value in tokenizer.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES = [(kind, byte_level() | {"pre": pre}) for kind, pre in PRE.items()]
CASES += [("llama", sentencepiece()), ("phi3", sentencepiece())]


def test_every_architecture_is_tried() -> None:
    assert {kind for kind, _ in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize(("architecture", "tokenizer"), CASES, ids=[f"{kind}, {made['model']}" for kind, made in CASES])
def test_ids_are_those_of_transformers(architecture: str, tokenizer: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, tokenizer)
    file = read_gguf(path)
    convert_tokenizer(file, eos_ids_of(file), tmp_path)
    ours = Tokenizer.from_file(tmp_path / TOKENIZER_FILE, eos_ids_of(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in TEXTS:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text) == theirs.encode(text), text
    assert any(len(ours.encode(text, special=True)) > 1 for text in TEXTS)


def test_a_tokenizer_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "tiny.gguf", "llama", byte_level() | {"model": "rwkv"}))
    with pytest.raises(SetupError, match=r"transformers cannot rebuild its tokenizer: .*'rwkv'"):
        convert_tokenizer(file, (2,), tmp_path)
