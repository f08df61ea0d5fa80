"""Finds a model by what the operator calls it, prepares it once, and says what it is."""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError
from schemas.subjects import model_slug
from services.models import gguf_config, hf_folder, hub, smollm2
from services.models.architecture import Architecture
from services.models.cache import CACHE_VERSION, Manifest, ModelCache
from services.models.digest import FileDigests, canonical_json, digest_of
from services.models.files import CONFIG_FILE, FINGERPRINT_BYTES, ModelFiles, Stamp
from services.models.gguf_file import GgufFile, read_gguf
from services.models.gguf_tensors import product_formats, tensors_of
from services.models.gguf_tokenizer import convert_tokenizer
from services.models.tokenizer_files import SOURCE_FILES, copy_tokenizer

Progress = Callable[[str], None]

BUILD_DIGITS = 12
SAMPLING_VERSION = 2
"""Of `kernels.reference.sampling`: another number whenever the same logits may give another token."""
_QUANTISATION = re.compile(r"[._-](q\d\w*|iq\d\w*|b?f16|f32)$", re.IGNORECASE)
# Settings that do not change what a model computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


def resolve(spec: str, data_dir: Path | str, progress: Progress | None = None) -> ModelFiles:
    """`smollm2`, the path of a GGUF file or of a Hugging Face folder, or a Hugging Face id (`org/name[@revision]`).

    The first time this downloads (what has no path) and converts, for up to half a minute, telling `progress` a line
    at a time; later it takes a fraction of a second. Safe from several processes at once.
    Raises `SetupError` that says what to do.
    """
    say = progress or _silent
    cache = ModelCache(Path(data_dir))
    path = Path(os.path.expanduser(spec))
    if spec == smollm2.SPEC:
        return _from_gguf(smollm2.NAME, _default_gguf(cache, say), cache, say, check=smollm2.check)
    if spec and os.path.isfile(path):
        return _from_gguf(_QUANTISATION.sub("", path.stem), path, cache, say)
    if spec and os.path.isdir(path):
        return _from_folder(path.resolve().name, path, cache, say)
    if hub.is_id(spec) and path.suffix != ".gguf":
        return _from_folder(spec.partition("@")[0], hub.snapshot(spec, say, _check_folder), cache, say)
    raise SetupError(
        f"there is no model {spec!r}: give {smollm2.SPEC}, the path of a .gguf file or of a Hugging Face folder, "
        "or a Hugging Face id (organisation/name)"
    )


def cached(data_dir: Path | str) -> list[ModelFiles]:
    """The models that are ready in the data folder."""
    return [_files(m.name, folder, Path(m.source), m) for folder, m in ModelCache(Path(data_dir)).all()]


def build_id(files: ModelFiles, *arithmetic_ids: bytes) -> str:
    """12 hex digits over weights, tokenizer, arithmetics and sampling: only its own build ever continues a job."""
    parts = [files.fingerprint, files.tokenizer_hash, *arithmetic_ids, bytes([SAMPLING_VERSION])]
    return digest_of(parts, "kvrelay-build").hex()[:BUILD_DIGITS]


def text_id(files: ModelFiles) -> str:
    """12 hex digits over what turns a job into token ids and limits: builds that agree on it draft the same."""
    limits = canonical_json({"context": files.context_tokens, "vocabulary": files.vocab_size})
    return digest_of([files.tokenizer_hash, limits], "kvrelay-text").hex()[:BUILD_DIGITS]


def _default_gguf(cache: ModelCache, say: Progress) -> Path:
    found = smollm2.find(cache.downloads)
    if found is None:
        with cache.locked(smollm2.SPEC):  # processes that start together download once
            found = smollm2.find(cache.downloads) or smollm2.fetch(cache.downloads, say)
    return found


def _from_gguf(
    name: str,
    path: Path,
    cache: ModelCache,
    say: Progress,
    check: Callable[[Path, bytes], None] | None = None,
) -> ModelFiles:
    """`check(path, digest)` raises if this is not the file that it should be."""
    stamp = Stamp.of(path)
    digest = FileDigests(cache.digest_index).of(path)
    if check:
        check(path, digest)
    content = digest_of([b"gguf", bytes([CACHE_VERSION]), digest], "kvrelay-content")
    manifest = cache.find(content)
    if manifest is None:
        gguf = read_gguf(path)
        config = gguf_config.config_of(gguf)
        formats = product_formats(tensors_of(gguf, config), config)
        say(f"preparing {name}, once (5 to 15 s)")
        manifest = cache.prepare(content, lambda folder: _convert(name, gguf, config, formats, digest, folder, say))
    return _files(name, cache.folder(content), path, manifest, (stamp,))


def _convert(
    name: str,
    gguf: GgufFile,
    config: dict[str, Any],
    formats: list[str],
    digest: bytes,
    folder: Path,
    say: Progress,
) -> Manifest:
    eos_ids = gguf_config.eos_ids_of(gguf)
    say(f"{name}: rebuilding the tokenizer")
    tokenizer_hash = convert_tokenizer(gguf, eos_ids, folder)
    _write_config(folder, config)
    manifest = _manifest(name, gguf.path, config, [digest], tokenizer_hash, eos_ids, weights=[])
    return msgspec.structs.replace(manifest, product_formats=formats)


def _check_folder(path: Path) -> dict[str, Any]:
    """Its config, if that is one of a model we serve."""
    config = hf_folder.config_of(path)
    Architecture.from_hf(config, str(path))
    return config


def _from_folder(name: str, path: Path, cache: ModelCache, say: Progress) -> ModelFiles:
    config = _check_folder(path)
    weights = hf_folder.weight_names(path)
    stamps = tuple(Stamp.of(path / weight) for weight in weights)
    digests = FileDigests(cache.digest_index)
    weight_digests = [digests.of(path / weight) for weight in weights]
    small = [path / file for file in (CONFIG_FILE, hf_folder.GENERATION_FILE, *SOURCE_FILES)]
    small_digests = [digests.of(file) if file.is_file() else b"" for file in small]
    content = digest_of([b"folder", bytes([CACHE_VERSION]), *small_digests, *weight_digests], "kvrelay-content")
    manifest = cache.find(content)
    if manifest is None:
        say(f"preparing {name}")
        manifest = cache.prepare(content, lambda folder: _copy(name, path, config, weights, weight_digests, folder))
    return _files(name, cache.folder(content), path, manifest, stamps)


def _copy(
    name: str, path: Path, config: dict[str, Any], weights: list[str], weight_digests: list[bytes], folder: Path
) -> Manifest:
    """A folder's weights stay where they are."""
    tokenizer_hash = copy_tokenizer(path, folder)
    _write_config(folder, config)
    eos_ids = hf_folder.eos_ids_of(path, config)
    return _manifest(name, path, config, weight_digests, tokenizer_hash, eos_ids, weights)


def _manifest(
    name: str,
    source: Path,
    config: dict[str, Any],
    weight_digests: Iterable[bytes],
    tokenizer_hash: bytes,
    eos_ids: tuple[int, ...],
    weights: list[str],
) -> Manifest:
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    fingerprint = digest_of([canonical_json(identity), *weight_digests], "kvrelay-model", FINGERPRINT_BYTES)
    return Manifest(
        name=name,
        source=str(source.absolute()),
        config=config,
        fingerprint=fingerprint.hex(),
        tokenizer_hash=tokenizer_hash.hex(),
        eos_ids=list(eos_ids),
        weights=weights,
    )


def _files(name: str, folder: Path, source: Path, manifest: Manifest, stamps: tuple[Stamp, ...] = ()) -> ModelFiles:
    return ModelFiles(
        name=name,
        slug=model_slug(name),
        path=folder,
        config=manifest.config,
        fingerprint=bytes.fromhex(manifest.fingerprint),
        tokenizer_hash=bytes.fromhex(manifest.tokenizer_hash),
        context_tokens=manifest.config["max_position_embeddings"],
        vocab_size=manifest.config["vocab_size"],
        eos_ids=tuple(manifest.eos_ids),
        weights=tuple(source / weight for weight in manifest.weights) or (source,),
        product_formats=tuple(manifest.product_formats),
        source=str(source),
        stamps=stamps,
    )


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=True, indent=1), encoding="utf-8")


def _silent(line: str) -> None:
    pass
