"""Hugging Face folders: what is taken from them, what makes two of them different, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import SetupError
from schemas.job import Message
from services.models import digest
from services.models.registry import build_id, cached, resolve
from services.text.model import load_text
from tests.models.tiny_folder import CONFIG, TEMPLATE, TOKENIZER_CONFIG, write_folder, write_json


def test_what_is_taken_from_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny-Model", shards=2)
    lines: list[str] = []
    files = resolve(str(folder), tmp_path / "data", lines.append)
    assert (files.name, files.slug) == ("Tiny-Model", "tiny-model")
    assert (files.context_tokens, files.vocab_size, files.eos_ids) == (64, 500, (257,))
    assert [path.name for path in files.weights] == ["model-0-of-2.safetensors", "model-1-of-2.safetensors"]
    assert all(path.parent == folder for path in files.weights)
    assert lines == ["preparing Tiny-Model"]
    assert resolve(str(folder), tmp_path / "data", lines.append) == files
    assert cached(tmp_path / "data") == [msgspec.structs.replace(files, stamps=())]
    assert len(lines) == 1
    text = load_text(files)
    assert text.template is not None
    ids = text.template.render_ids([Message(role="user", content="the</s>")], text.tokenizer)
    assert text.tokenizer.decode(ids, skip_special=False) == "<s>the</s></s>"


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    write_json(folder / "generation_config.json", {"eos_token_id": [5, 3, 5]})
    assert resolve(str(folder), tmp_path / "data").eos_ids == (3, 5)


def test_templates_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    for template, rendered in ((TEMPLATE, "<s>a</s>"), (named, "<s>a</s>"), ("{{ messages[0].role }}", "user")):
        write_json(folder / "tokenizer_config.json", {**TOKENIZER_CONFIG, "chat_template": template})
        text = load_text(resolve(str(folder), tmp_path / "data"))
        assert text.template is not None
        assert text.template.render([{"role": "user", "content": "a"}]) == rendered
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    assert load_text(resolve(str(folder), tmp_path / "data")).template is None


def test_everything_that_changes_an_answer_changes_the_identity(tmp_path: Path) -> None:
    """CASES 3: weights, rope, tokenizer and template; and only these."""

    def build(name: str, **changes: Any) -> tuple[str, str]:
        files = resolve(str(write_folder(tmp_path / name, **changes)), tmp_path / "data")
        return files.fingerprint.hex(), files.tokenizer_hash.hex()

    base = build("base")
    assert build("same", config={"transformers_version": "9", "torch_dtype": "float16"}) == base
    changed = [
        build("weights", value=1.5),
        build("rope", config={"rope_theta": 5e5}),
        build("context", config={"max_position_embeddings": 32}),
        build("shards", shards=2),
    ]
    fingerprints = {base[0], *(fingerprint for fingerprint, _ in changed)}
    assert len(fingerprints) == 5
    assert {tokenizer for _, tokenizer in changed} == {base[1]}
    folder = write_folder(tmp_path / "template")
    (folder / "chat_template.jinja").write_text(TEMPLATE + " ", encoding="utf-8")
    files = resolve(str(folder), tmp_path / "data")
    assert files.fingerprint.hex() == base[0]
    assert files.tokenizer_hash.hex() != base[1]


def test_the_build_covers_weights_tokenizer_and_every_arithmetic(tmp_path: Path) -> None:
    files = resolve(str(write_folder(tmp_path / "a")), tmp_path / "data")
    other = resolve(str(write_folder(tmp_path / "b", value=2.0)), tmp_path / "data")
    one, two = b"float32\0", b"bfloat16"
    builds = [build_id(files, one), build_id(files, two), build_id(files, one, two), build_id(other, one)]
    assert len(set(builds)) == 4
    assert all(len(build) == 12 and int(build, 16) >= 0 for build in builds)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type None"),
        ({"sliding_window": 63}, "sliding_window=63"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['sliding_attention']"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method='gptq'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.quant_method='bitsandbytes'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method='fp8'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quant_method='compressed-tensors'"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window=4096"),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, "sliding_window=32"),
        ({"model_type": "phi3", "sliding_window": 47}, "sliding_window=47"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type='proportional'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor must be a number"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 0}}, "rope_scaling.factor must be a number above zero"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 2], "long_factor": [1, 3]}}, "rope_type='longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention="),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": -1}, "hidden_size must be a positive number"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1024"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above zero"),
        ({"vocab_size": "many"}, "vocab_size must be a positive number"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads 3 is no multiple"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive number"),
        ({"head_dim": 15}, "head_dim must be a multiple of 16"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a number"),
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    folder = write_folder(tmp_path / "m", config=config)
    with pytest.raises(SetupError) as refused:
        resolve(str(folder), tmp_path / "data")
    assert named in refused.value.message
    assert str(folder) in refused.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2},
        {"model_type": "mistral", "sliding_window": 64, "num_key_value_heads": 2},
        {"model_type": "qwen2", "sliding_window": 32},
        {"rope_scaling": {"type": "longrope", "short_factor": [2, 3], "long_factor": [2, 3]}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"layer_types": ["full_attention"], "attention_bias": True},
    ],
)
def test_what_is_supported(tmp_path: Path, config: dict[str, Any]) -> None:
    assert resolve(str(write_folder(tmp_path / "m", config=config)), tmp_path / "data").config == CONFIG | config


def test_weights_that_change_between_hashing_and_loading_are_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", shards=2)
    files = resolve(str(folder), tmp_path / "data")
    files.check_unchanged()
    write_folder(tmp_path / "other", shards=2, value=2.0)
    (tmp_path / "other" / files.weights[1].name).replace(files.weights[1])
    with pytest.raises(SetupError, match=r"model-1-of-2\.safetensors was changed while it was loaded"):
        files.check_unchanged()
    files.weights[1].unlink()
    with pytest.raises(SetupError, match=r"cannot read .*model-1-of-2\.safetensors"):
        files.check_unchanged()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(SetupError, match=name.replace(".", r"\.")):
        resolve(str(folder), tmp_path / "data")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json", "generation_config.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_broken_json_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_bytes(content)
    with pytest.raises(SetupError, match=name.replace(".", r"\.")):
        resolve(str(folder), tmp_path / "data")


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_cut_weights_are_noticed(tmp_path: Path, keep: int) -> None:
    folder = write_folder(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        resolve(str(folder), tmp_path / "data")


@pytest.mark.parametrize(
    "head",
    [
        b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":["x"],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":["0",8]}}',
        b'{"a":[]}',
        b"[]",
    ],
)
def test_a_strange_head_is_a_setup_error(tmp_path: Path, head: bytes) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        resolve(str(folder), tmp_path / "data")


def test_an_index_must_hold_what_it_promises(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"t0": "model-0-of-2.safetensors", "t9": "model-1-of-2.safetensors"}})
    with pytest.raises(SetupError, match="lacks t9"):
        resolve(str(folder), tmp_path / "data")
    write_json(index, {"weight_map": {"t0": "../elsewhere.safetensors"}})
    with pytest.raises(SetupError, match="no file in its folder"):
        resolve(str(folder), tmp_path / "data")
    write_json(index, {"weight_map": {"t0": "absent.safetensors"}})
    with pytest.raises(SetupError, match="absent"):
        resolve(str(folder), tmp_path / "data")


def test_large_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is believed while size, time and inode stand, and a damaged index only costs time."""
    monkeypatch.setattr(digest, "ALWAYS_HASHED_BYTES", 100)
    hashed: list[Path] = []
    original = digest._hash_file
    monkeypatch.setattr(digest, "_hash_file", lambda path: hashed.append(path) or original(path))
    file, index = tmp_path / "weights", tmp_path / "sub" / "digests.json"
    file.write_bytes(b"x" * 1000)
    digests = digest.FileDigests(index)
    first = digests.of(file)
    assert digests.of(file) == first == digest.FileDigests(index).of(file)
    assert len(hashed) == 1
    other = tmp_path / "other"
    other.write_bytes(b"y" * 1000)
    other.replace(file)
    assert digests.of(file) != first
    index.write_bytes(b"{")
    digests.of(file)
    assert len(hashed) == 3


def test_an_adapter_is_named_and_so_is_its_base(tmp_path: Path) -> None:
    """With a model beside it too: transformers would join the two."""
    folder = write_folder(tmp_path / "m")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    with pytest.raises(SetupError, match=r"is a LoRA adapter .* 'org/base' \(peft's merge_and_unload\)"):
        resolve(str(folder), tmp_path / "data")
