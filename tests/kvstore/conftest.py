import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kvstore.valkey import Valkey, running


def _mount(*arguments: str) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=10m", "none", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path, bool], None]]:
    """`read_only(folder, True)` lets nobody write to an existing folder, `False` lets them again."""
    mounted: set[Path] = set()

    def switch(folder: Path, on: bool) -> None:
        if folder not in mounted:
            _mount("--bind", str(folder), str(folder))
            mounted.add(folder)
        _mount("-o", f"remount,bind,{'ro' if on else 'rw'}", str(folder))

    yield switch
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(valkey_server: Valkey) -> Valkey:
    """Empty. Leave it running."""
    valkey_server.client().flushall()
    return valkey_server
