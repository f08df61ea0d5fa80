"""What a model is on disk: everything that a process needs to know of one before it reads the weights."""

from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError

FINGERPRINT_BYTES = 8

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"


class Stamp(msgspec.Struct, frozen=True):
    """Of a file. One that is the same means, as far as anybody can tell cheaply, that the file is."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """Raises `SetupError` for a file that is not there."""
        try:
            stat = path.stat()
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error}") from error
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was found, checked and prepared. Reading one needs neither torch nor transformers.

    `path` is its folder in the cache with `config.json` (Hugging Face's form), `tokenizer.json` and
    `tokenizer_config.json` (with the chat template). `weights` are safetensors files, or one GGUF, where the user keeps
    them, and `stamps` what these were like before they were hashed. `product_formats` are the GGUF's formats of all
    weights that are multiplied or looked up, none for safetensors. `fingerprint` covers the weights and the config,
    `tokenizer_hash` the tokenizer, its special tokens and the chat template: both go into every key.
    """

    name: str
    slug: str
    path: Path
    config: dict[str, Any]
    fingerprint: bytes
    tokenizer_hash: bytes
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    weights: tuple[Path, ...]
    product_formats: tuple[str, ...] = ()
    source: str = ""
    stamps: tuple[Stamp, ...] = ()

    def check_unchanged(self) -> None:
        """Asked once the weights are loaded. Raises `SetupError` if they are not those that the fingerprint is of."""
        for path, stamp in zip(self.weights, self.stamps, strict=False):
            if Stamp.of(path) != stamp:
                raise SetupError(f"{path} was changed while it was loaded: leave it alone, and start again")
