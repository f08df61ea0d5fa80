"""For whom a prompt is explained or pinned: the model, its text, and the identity under which its workers store."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.identities import KnownIdentity
from schemas.errors import SetupError
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
    wanted = (files.fingerprint, files.tokenizer_hash, settings.compute.dtype, settings.kv.block_tokens)
    for known in identities:
        found = known.identity
        if wanted == (found.fingerprint, found.tokenizer_hash, known.record.dtype, found.block_tokens):
            return known
    others = ", ".join(sorted({f"{k.record.model} {k.record.dtype} {k.record.block_tokens}" for k in identities}))
    raise SetupError(
        f"no worker of {files.slug} with {settings.compute.dtype} and blocks of {settings.kv.block_tokens} tokens has "
        f"used this store, so it holds nothing for it. It was used by: {others or 'nobody'}"
    )


def other_texts(data_dir: str | Path, own: ModelFiles) -> dict[bytes, TextModel]:
    """The tokenizers that are ready in the data folder, by their hash, but for `own`."""
    others = {files.tokenizer_hash: files for files in cached(data_dir) if files.tokenizer_hash != own.tokenizer_hash}
    return {tokenizer_hash: load_text(files) for tokenizer_hash, files in others.items()}
