"""GGUF files: read as `transformers` does, and refused when unsupported or damaged (CASES 15)."""

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kernels.quantised_weight import BLOCK_BYTES
from schemas.errors import SetupError
from services.engine.weight_source import open_weights
from services.models import gguf_config
from services.models.gguf_file import read_gguf
from services.models.gguf_tensors import tensors_of
from tests.models.default_model import default_model
from tests.models.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def loaded(path: Path) -> dict[str, Any]:
    """Every tensor under its Hugging Face name, as float32."""
    config = gguf_config.config_of(read_gguf(path))
    shapes = {target: stored.tensor.shape for target, stored in tensors_of(read_gguf(path), config).items()}
    with open_weights([path], config) as source:
        return {name: source.read(name, *shape).float().numpy() for name, shape in shapes.items()}


def test_metadata_and_tensors_are_those_of_the_gguf_package(tiny: Path) -> None:
    file, reader = read_gguf(tiny), gguf.GGUFReader(tiny)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    assert len(file.tensors) == len(reader.tensors)
    raw = tiny.read_bytes()
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type == tensor.tensor_type.name
        assert raw[ours.start : ours.start + ours.num_bytes] == tensor.data.tobytes()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_those_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    """Bit for bit, all six types, rows of Q and K put back in order."""
    path = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    ours = loaded(path)
    wanted = _loaded_by_transformers(path)
    wanted.pop("lm_head.weight", None) if tied else None
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].tobytes() == tensor.float().numpy().tobytes(), name


def test_quantised_weights_are_views_of_the_file(tiny: Path) -> None:
    """No copy: the blocks of two tensors lie as far apart as in the file. Rows come in Hugging Face's order."""
    file = read_gguf(tiny)
    config = gguf_config.config_of(file)
    with open_weights([tiny], config) as source:
        stored = {name: kind for name, kind in source.formats().items() if kind in BLOCK_BYTES}
        shapes = {name: tensor.tensor.shape for name, tensor in tensors_of(file, config).items()}
        read = {name: (source.read_quantised(name, *shapes[name]), source.read(name, *shapes[name])) for name in stored}
    assert set(stored.values()) == {"Q4_0", "Q4_1", "Q8_0"}
    starts = {name: tensor.tensor.start for name, tensor in tensors_of(file, config).items()}
    base = {weight.blocks.data_ptr() - starts[name] for name, (weight, _) in read.items()}
    assert len(base) == 1
    for name, (weight, values) in read.items():
        assert (weight.format, weight.outputs, weight.inputs) == (stored[name], *shapes[name])
        assert (weight.row_order is not None) == name.endswith(("q_proj.weight", "k_proj.weight"))
        assert torch.equal(weight.dequantise(), values)


def test_what_cannot_be_read_as_blocks_is_named(tiny: Path) -> None:
    config = gguf_config.config_of(read_gguf(tiny))
    with open_weights([tiny], config) as source:
        with pytest.raises(SetupError, match=r"self_attn\.o_proj\.weight is F16, not one of Q4_0, Q4_1, Q8_0"):
            source.read_quantised("model.layers.0.self_attn.o_proj.weight", 64, 64)
        with pytest.raises(SetupError, match=r"no tensor lm_head\.bias"):
            source.read("lm_head.bias", 264)
        with pytest.raises(SetupError, match=r"q_proj\.weight is \[64, 64\], the config implies \[32, 64\]"):
            source.read_quantised("model.layers.0.self_attn.q_proj.weight", 32, 64)


def _loaded_by_transformers(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = LlamaConfig(**gguf_config.config_of(read_gguf(path)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        loaded: dict[str, Any] = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        return loaded


@pytest.mark.slow
def test_the_default_model_equals_that_of_transformers() -> None:
    path = default_model().weights[0]
    ours, wanted = loaded(path), _loaded_by_transformers(path)
    assert ours.keys() == wanted.keys() - {"lm_head.weight"}
    assert all(ours[name].tobytes() == wanted[name].float().numpy().tobytes() for name in ours)


def test_the_config_is_hugging_faces(tiny: Path) -> None:
    config = gguf_config.config_of(read_gguf(tiny))
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rope_theta"], config["max_position_embeddings"], config["vocab_size"]) == (10000.0, 128, 264)
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q5_0, Type.IQ4_NL, Type.IQ2_XS, Type.TQ1_0])
def test_other_tensor_types_are_refused_by_name(tmp_path: Path, kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, block_bytes * 256 // block_values), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SetupError, match=rf"blk\.0\.attn_q\.weight has the type {kind.name}; supported are BF16, F16"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.sliding_window": 100}, "llama.attention.sliding_window=100"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 1}, "yarn_log_multiplier=1"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "is a lora adapter"),
        ({"general.type": "mmproj"}, "general.type 'mmproj'"),
        ({"split.count": 2}, "one of several parts"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"llama.block_count": 2**31}, "llama.block_count"),
        ({"llama.block_count": 1}, "tensor blk.1.attn_q.weight does not belong"),
        ({"llama.block_count": 3}, "lacks the tensor for model.layers.2"),
        ({"llama.embedding_length": "many"}, "llama.embedding_length must be one int"),
        ({"llama.feed_forward_length": 32}, "the config implies"),
    ],
)
def test_unsupported_and_contradictory_settings_are_named(tmp_path: Path, metadata: Any, named: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(SetupError) as refused:
        loaded(path)
    assert named in refused.value.message


@pytest.mark.parametrize("architecture", ["mamba", "gemma3", "deepseek2", "qwen2moe", "qwen3moe", "llama4", "phi2"])
def test_another_architecture_is_named(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SetupError, match=f"'{architecture}' is not supported"):
        gguf_config.config_of(read_gguf(path))


def test_every_cut_is_noticed(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    sizes = [0, 1, 4, 8, 23, 24, *random.Random(1).sample(range(25, len(whole)), 200), len(whole) - 1]
    for size in sizes:
        cut.write_bytes(whole[:size])
        with pytest.raises(SetupError):
            read_gguf(cut)


def test_damage_is_a_setup_error_or_not_in_the_head(tiny: Path, tmp_path: Path) -> None:
    """Any byte of the head may be wrong: no other exception, no endless loop, no huge allocation."""
    whole = tiny.read_bytes()
    head_bytes = min(tensor.start for tensor in read_gguf(tiny).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    dice = random.Random(2)
    for _ in range(400):
        broken = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            broken[dice.randrange(head_bytes)] = dice.choice([0, 0xFF, dice.randrange(256)])
        damaged.write_bytes(broken)
        try:
            loaded(damaged)
        except SetupError as error:
            assert str(damaged) in error.message


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"not a model at all", b"GGUF\x01\0\0\0" + bytes(16), b"GGUF\3\0\0\0" + b"\xff" * 16]
)
def test_other_files_are_setup_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=r"x\.gguf"):
        read_gguf(path)


def test_unreadable_files_are_setup_errors(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot read"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(SetupError, match="cannot read"):
        read_gguf(tmp_path)
    assert os.listdir(tmp_path) == []
