"""Who shares a folder of blocks gives it the same name; nobody else does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.place import place_of


def test_all_who_share_a_folder_agree_on_its_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        names = set(threads.map(place_of, [tmp_path / "kv"] * 50))
    assert len(names) == 1 and names != {""}
    assert place_of(tmp_path / "other") not in names
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    assert {place_of(tmp_path / "link")} == names
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["place"]


def test_a_folder_that_cannot_be_used_is_shared_with_nobody(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"a file")
    assert place_of(tmp_path / "kv") == ""
