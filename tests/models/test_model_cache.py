"""The cache of prepared models: complete or absent, whoever crashes or starts at the same time."""

import multiprocessing
from pathlib import Path

import msgspec
import pytest

from schemas.errors import SetupError
from services.models.cache import CACHE_VERSION, Manifest, ModelCache
from services.models.files import MANIFEST_FILE

CONTENT = b"\x01\x02\x03\x04"
MANIFEST = Manifest(
    name="tiny", source="/x", config={}, fingerprint="00", tokenizer_hash="00", eos_ids=[2], weights=["weights"]
)


def write(folder: Path) -> Manifest:
    (folder / "weights").write_bytes(b"w" * 1000)
    with (folder.parent / "made").open("ab") as made:
        made.write(b"x")
    return MANIFEST


def prepare(data_dir: Path) -> None:
    ModelCache(data_dir).prepare(CONTENT, write)


def num_made(cache: ModelCache) -> int:
    return (cache.root / "made").stat().st_size


def test_prepared_once_and_found_again(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    assert cache.find(CONTENT) is None
    manifest = cache.prepare(CONTENT, write)
    assert cache.find(CONTENT) == cache.prepare(CONTENT, write) == manifest
    assert manifest.files == {"weights": 1000}
    assert [(folder, found.name) for folder, found in cache.all()] == [(cache.folder(CONTENT), "tiny")]
    assert num_made(cache) == 1


def test_two_processes_at_once_prepare_it_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=prepare, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert num_made(ModelCache(tmp_path)) == 1


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> Manifest:
        write(folder)
        raise SetupError("no tokenizer")

    cache = ModelCache(tmp_path)
    with pytest.raises(SetupError, match="no tokenizer"):
        cache.prepare(CONTENT, fail)
    assert cache.all() == []
    assert [entry for entry in cache.root.iterdir() if entry.is_dir()] == []


def die(data_dir: Path) -> None:
    def killed(folder: Path) -> Manifest:
        import os
        import signal

        write(folder)
        os.kill(os.getpid(), signal.SIGKILL)
        return MANIFEST

    ModelCache(data_dir).prepare(CONTENT, killed)


def test_a_crash_in_the_middle_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=die, args=(tmp_path,))
    process.start()
    process.join()
    cache = ModelCache(tmp_path)
    assert process.exitcode == -9
    assert cache.all() == []
    assert any(entry.is_dir() for entry in cache.root.iterdir())  # what it left is there, and never served
    cache.prepare(CONTENT, write)
    assert [entry.name for entry in cache.root.iterdir() if entry.is_dir()] == [CONTENT.hex()]


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "version"])
def test_an_incomplete_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    cache = ModelCache(tmp_path)
    cache.prepare(CONTENT, write)
    folder = cache.folder(CONTENT)
    manifest = (folder / MANIFEST_FILE).read_bytes()
    if damage == "cut":
        (folder / "weights").write_bytes(b"w" * 999)
    elif damage == "missing":
        (folder / "weights").unlink()
    elif damage == "manifest":
        (folder / MANIFEST_FILE).write_bytes(manifest[:-10])
    else:
        version = f'"version": {CACHE_VERSION}'.encode()
        assert version in manifest
        (folder / MANIFEST_FILE).write_bytes(manifest.replace(version, b'"version": 0'))
    assert cache.find(CONTENT) is None
    assert cache.all() == []
    cache.prepare(CONTENT, write)
    assert cache.find(CONTENT) is not None
    assert num_made(cache) == 2


def test_what_an_earlier_version_made_of_the_same_model_goes(tmp_path: Path) -> None:
    """Wherever it lies: the version is part of a folder's name."""
    cache = ModelCache(tmp_path)
    old = {name: cache.root / name for name in ("same", "other", "newer")}
    versions = {"same": CACHE_VERSION - 1, "other": CACHE_VERSION - 1, "newer": CACHE_VERSION + 1}
    for name, folder in old.items():
        folder.mkdir(parents=True)
        fingerprint = "11" if name == "other" else MANIFEST.fingerprint
        manifest = msgspec.structs.replace(MANIFEST, version=versions[name], fingerprint=fingerprint)
        (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    cache.prepare(CONTENT, write)
    assert {name for name, folder in old.items() if folder.exists()} == {"other", "newer"}


def test_a_folder_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way", encoding="utf-8")
    with pytest.raises(SetupError, match="cannot write the model cache"):
        ModelCache(tmp_path).prepare(CONTENT, write)
