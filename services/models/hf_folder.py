"""A Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from schemas.errors import SetupError
from services.models.files import CONFIG_FILE, WEIGHTS_FILE
from services.models.safetensors_file import tensor_names

INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"


def read_object(path: Path) -> dict[str, Any]:
    """Raises `SetupError` unless the file is there and holds a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} holds no JSON object")
    return value


def config_of(folder: Path) -> dict[str, Any]:
    """Raises `SetupError` for a folder that holds no model, or an adapter, which transformers would join to one."""
    if (folder / ADAPTER_FILE).is_file():
        base = read_object(folder / ADAPTER_FILE).get("base_model_name_or_path")
        raise SetupError(
            f"{folder} is a LoRA adapter ({ADAPTER_FILE}): adapters are not supported, merge it into its base model "
            f"{base!r:.80} (peft's merge_and_unload) and give that folder"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise SetupError(f"{folder} has no {CONFIG_FILE}: it is no Hugging Face model folder")
    return read_object(folder / CONFIG_FILE)


def eos_ids_of(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The end tokens of generation_config.json, or of the config; either names one id or several."""
    generation = read_object(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(id_, int) for id_ in ids):
        raise SetupError(f"{folder}: eos_token_id must be a number or a list of numbers, got {found!r:.80}")
    return tuple(sorted(set(ids)))


def weight_names(folder: Path) -> list[str]:
    """The safetensors files, checked to be whole and, where an index names tensors, to hold them.

    Raises `SetupError`.
    """
    if (folder / INDEX_FILE).is_file():
        return _shards(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise SetupError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: only safetensors weights are supported"
        )
    tensor_names(folder / WEIGHTS_FILE)
    return [WEIGHTS_FILE]


def _shards(folder: Path) -> list[str]:
    where = read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise SetupError(f"{folder / INDEX_FILE} has no weight_map")
    shards = sorted(set(where.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise SetupError(f"{folder / INDEX_FILE} names {shard!r}, which is no file in its folder")
        wanted = {tensor for tensor, holder in where.items() if holder == shard}
        if missing := wanted - tensor_names(folder / shard):
            raise SetupError(f"{folder / shard} lacks {min(missing)}, which {INDEX_FILE} promises: get it again")
    return shards
