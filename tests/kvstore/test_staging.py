import os
import threading
from pathlib import Path

import pytest

from kvstore.staging import Staging


def parts_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("tmp/*.part"))


def locks_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("tmp/*.lock"))


def new_part(staging: Staging) -> str:
    path, fd = staging.create()
    os.close(fd)
    return path


def test_names_are_unique(tmp_path: Path) -> None:
    one, other = Staging(tmp_path), Staging(tmp_path)
    paths = [new_part(staging) for staging in (one, other) for _ in range(10)]
    assert len(set(paths)) == 20
    one.close()
    other.close()


def test_the_dead_are_cleaned_up_after_and_the_living_left_alone(tmp_path: Path) -> None:
    alive, dead = Staging(tmp_path), Staging(tmp_path)
    kept = new_part(alive)
    new_part(dead)
    dead.close()
    late = Staging(tmp_path)
    late.open()
    assert parts_in(tmp_path) == [Path(kept).name]
    assert len(locks_in(tmp_path)) == 2
    alive.close()
    late.close()
    Staging(tmp_path).clean()
    assert parts_in(tmp_path) == locks_in(tmp_path) == []


def test_a_part_without_a_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "0123456789abcdef.1-0.part").write_bytes(b"x")
    assert Staging(tmp_path).clean() == 1
    assert parts_in(tmp_path) == []


@pytest.mark.parametrize("round", range(40))
def test_many_open_at_once_without_harming_each_other(tmp_path: Path, round: int) -> None:
    """Nobody takes one who has made his lock file and not locked it yet for dead."""
    stagings = [Staging(tmp_path) for _ in range(16)]
    barrier = threading.Barrier(len(stagings))
    paths: list[str] = []

    def work(staging: Staging) -> None:
        barrier.wait()
        paths.append(new_part(staging))

    threads = [threading.Thread(target=work, args=(staging,)) for staging in stagings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == len(stagings)
    assert all(os.path.exists(path) for path in paths)
    for staging in stagings:
        staging.close()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tmp").write_bytes(b"")
    staging = Staging(tmp_path)
    with pytest.raises(OSError):
        staging.create()
    (tmp_path / "tmp").unlink()
    new_part(staging)
    staging.close()
