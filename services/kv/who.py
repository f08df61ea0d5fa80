"""For whom a prompt is explained or pinned: the model, its text, and the identity under which its workers store."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.identities import KnownIdentity
from schemas.errors import SetupError
from services.models.compute_dtype import concrete_dtype
from services.models.files import ModelFiles
from services.models.registry import cached, resolve
from services.settings import Settings
from services.text.model import TextModel, load_text

Say = Callable[[str], None]


class Who(NamedTuple):
    files: ModelFiles
    text: TextModel

    @classmethod
    def of(cls, settings: Settings, say: Say) -> "Who":
        """Raises `SetupError` for a model that cannot be had."""
        files = resolve(settings.compute.model, settings.kv.data_dir, progress=say)
        return cls(files, load_text(files))


def identity_of(settings: Settings, files: ModelFiles, identities: list[KnownIdentity]) -> KnownIdentity:
    """The one that was seen last of those that fit the settings. Raises `SetupError` if none does."""
    dtype = concrete_dtype(settings.compute.dtype, files)
    wanted = (files.fingerprint, files.tokenizer_hash, dtype, settings.kv.block_tokens)
    for known in identities:
        found = known.identity
        if wanted == (found.fingerprint, found.tokenizer_hash, _dtype(known), found.block_tokens):
            return known
    others = ", ".join(sorted({f"{k.record.model} {_dtype(k)} {k.record.block_tokens}" for k in identities}))
    raise SetupError(
        f"no worker of {files.slug} with {dtype} and blocks of {settings.kv.block_tokens} tokens has "
        f"used this store, so it holds nothing for it. It was used by: {others or 'nobody'}"
    )


def _dtype(known: KnownIdentity) -> str:
    """compute.dtype of the worker: two that store the same kind of elements may have computed them differently."""
    return known.record.arithmetic_name.partition(".")[0]


def other_texts(data_dir: str | Path, own: ModelFiles) -> dict[bytes, TextModel]:
    """The tokenizers that are ready in the data folder, by their hash, but for `own`."""
    others = {files.tokenizer_hash: files for files in cached(data_dir) if files.tokenizer_hash != own.tokenizer_hash}
    return {tokenizer_hash: load_text(files) for tokenizer_hash, files in others.items()}
