"""The folder of prepared models: `<data_dir>/models/<content digest>/`, each complete or absent.

A model is prepared beside its place and renamed into it, under a file lock, so that a crash leaves nothing that is
served and two processes that start at once prepare it once.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.models.files import MANIFEST_FILE

CACHE_VERSION = 3  # raised when a conversion would come out differently


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last into a prepared folder. `files`: name -> bytes of every other file there. `weights`: names of the
    safetensors files in the folder `source`; none where `source` is itself the file of weights, a GGUF of
    `product_formats`."""

    version: int = CACHE_VERSION
    name: str
    source: str
    config: dict[str, Any]
    fingerprint: str
    tokenizer_hash: str
    eos_ids: list[int]
    weights: list[str]
    product_formats: list[str] = []
    files: dict[str, int] = {}


_decoder = msgspec.json.Decoder(Manifest)


class ModelCache:
    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "models"

    @property
    def digest_index(self) -> Path:
        return self.root / "digests.json"

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"

    def folder(self, content: bytes) -> Path:
        return self.root / content.hex()

    def find(self, content: bytes) -> Manifest | None:
        return read_manifest(self.folder(content))

    def all(self) -> list[tuple[Path, Manifest]]:
        """Every complete model, in the order of their names."""
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        found = [(folder, read_manifest(folder)) for folder in folders if folder.is_dir()]
        complete = [(folder, manifest) for folder, manifest in found if manifest is not None]
        return sorted(complete, key=lambda pair: pair[1].name)

    def prepare(self, content: bytes, write: Callable[[Path], Manifest]) -> Manifest:
        """The manifest of `content`, made by `write(folder)` if nobody else has made it in the meantime.

        Raises `SetupError` when the folder cannot be written.
        """
        try:
            with self.locked(content.hex()):
                return self.find(content) or self._write(content, write)
        except OSError as error:
            raise SetupError(f"cannot write the model cache {self.root}: {error}") from error

    def _write(self, content: bytes, write: Callable[[Path], Manifest]) -> Manifest:
        beside = self.root / f".{content.hex()}.unfinished"
        shutil.rmtree(beside, ignore_errors=True)  # of a process that died here: we hold its lock
        beside.mkdir()
        try:
            manifest = write(beside)
            sizes = {file.name: file.stat().st_size for file in beside.iterdir()}
            manifest = msgspec.structs.replace(manifest, files=sizes)
            (beside / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            for file in beside.iterdir():
                _sync(file)
            shutil.rmtree(self.folder(content), ignore_errors=True)  # incomplete or of another version
            beside.rename(self.folder(content))
            _sync(self.root)
            self._drop_older(manifest)
            return manifest
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _drop_older(self, manifest: Manifest) -> None:
        """What earlier versions prepared of the same model: some wrote half a gigabyte of weights."""
        for folder in self.root.iterdir():
            old = _decode(folder)
            if old and old.version < manifest.version and old.fingerprint == manifest.fingerprint:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Waits for whoever holds the lock of that name; the system releases a dead process's.

        Raises `SetupError` when the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.root / f".{name}.lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise SetupError(f"cannot write the model cache {self.root}: {error}") from error
            yield


def read_manifest(folder: Path) -> Manifest | None:
    """None unless the folder is complete: a manifest of this version and every file of its size."""
    manifest = _decode(folder)
    if manifest is None or manifest.version != CACHE_VERSION:
        return None
    try:
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except OSError:
        return None
    return manifest if sizes == manifest.files else None


def _decode(folder: Path) -> Manifest | None:
    """Of any version; None without a readable manifest."""
    try:
        return _decoder.decode((folder / MANIFEST_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
