"""Listing, adding up, verifying and removing what lies in a store."""

from pathlib import Path

import pytest

from kvstore.identities import known
from schemas.errors import JobNotFound, SetupError
from services.kv.listing import row_of, rows
from services.kv.removal import collect, condemn, remove
from services.kv.totals import totals
from services.kv.verification import Damage, verify
from services.kv.view import Choice, StoreView
from services.settings import Kv
from tests.kv.shelf import Shelf

IDS = list(range(64))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def keys(shelf: Shelf, choice: Choice) -> set[str]:
    return {held.entry.name.key.hex() for held in shelf.view().held(choice)}


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--data"):
        StoreView.open(Kv(data_dir=str(tmp_path / "none")))


def test_blocks_are_chosen_by_tenant_model_and_use(shelf: Shelf) -> None:
    mine = {ref.key.hex() for ref in shelf.store(IDS)}
    acme = {ref.key.hex() for ref in shelf.store(IDS, "acme")}
    other = shelf.meet("big", fingerprint=b"othermdl")
    big = {ref.key.hex() for ref in shelf.store(IDS, "acme", other)}
    assert keys(shelf, Choice()) == mine | acme | big
    assert keys(shelf, Choice(tenant="acme")) == acme | big
    assert keys(shelf, Choice(tenant="acme", model="small")) == acme
    assert keys(shelf, Choice(unused_s=60)) == set()
    (old,) = shelf.store(list(range(900, 916)))
    shelf.expire(old)
    assert keys(shelf, Choice(unused_s=60)) == {old.key.hex()}


def test_a_row_says_what_the_header_says(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    pin = shelf.pin(IDS[:32])
    view = shelf.view()
    found = rows(view, view.held(), "tenant")
    assert [(row.start, row.tokens, row.pin) for row in found] == [
        (0, 16, pin.id), (16, 16, pin.id), (32, 16, None), (48, 16, None),
    ]  # fmt: skip
    (held,) = view.named(refs[0].key.hex()[:20])
    row = row_of(view, held, view.pinned(), whole=True)
    assert (row.model, row.codec, row.dtype, row.quantisation) == ("small", "lz4", "bfloat16", "none")
    assert row.header is not None and row.header["token_hash"] == refs[0].token_hash.hex()
    assert row.bytes == shelf.path(refs[0]).stat().st_size


def test_a_key_is_found_by_its_beginning(shelf: Shelf) -> None:
    refs = [ref for first in range(0, 4000, 16) for ref in shelf.store(list(range(first, first + 16)))]
    view = shelf.view()
    assert view.named(refs[7].key.hex().upper())[0].entry.name == refs[7].name
    with pytest.raises(SetupError, match="more of it"):
        view.named(refs[7].key.hex()[:1])
    with pytest.raises(JobNotFound):
        view.named("0" * 63)
    for bad in ("", "xyz", "../x"):
        with pytest.raises(SetupError, match="no key"):
            view.named(bad)


def test_totals_add_up_by_group(shelf: Shelf) -> None:
    shelf.store(IDS, codec="lz4")
    refs = shelf.store(IDS, "acme", codec="none")
    shelf.pin(IDS[:32], "acme")
    shelf.damage(refs[3])
    shelf.view().tiers[0].quarantine(refs[3].name)
    shelf.expire(refs[2])
    shelf.path(refs[1]).write_bytes(b"junk")
    found = totals(shelf.view())
    tenants, codecs = found.groups["tenant"], found.groups["codec"]
    assert (found.all.blocks, found.expired.blocks, found.pinned.blocks, found.unreadable.blocks) == (7, 1, 2, 1)
    assert (tenants["acme"].blocks, tenants["default"].blocks) == (3, 4)
    assert codecs["none"].ratio == 1.0 and codecs["lz4"].ratio > 1.05
    assert found.groups["model"]["small"].tokens == 6 * 16
    assert (found.quarantined_blocks, found.pins, found.damaged_pins) == (1, 1, 0)
    sizes = [path.stat().st_size for path in (shelf.root / "blocks").rglob("*.kvb")]
    assert found.all.bytes == sum(sizes)


def test_verify_finds_all_damage_and_moves_it_away(shelf: Shelf) -> None:
    refs = shelf.store(IDS) + shelf.store(IDS, "acme")
    for ref in (refs[1], refs[6]):
        shelf.damage(ref)
    told: list[Damage] = []
    kept = verify(shelf.view(), Choice(), keep=True, on_damage=told.append)
    assert {damage.key for damage in told} == {refs[1].key.hex(), refs[6].key.hex()}
    assert not kept.is_sound and shelf.path(refs[1]).exists()
    moved = verify(shelf.view(), Choice(tenant="acme"), keep=False, on_damage=told.append)
    assert [damage.key for damage in moved.damaged] == [refs[6].key.hex()] and not shelf.path(refs[6]).exists()
    verify(shelf.view(), Choice(), keep=False, on_damage=told.append)
    again = verify(shelf.view(), Choice(), keep=False, on_damage=told.append)
    assert again.is_sound and again.blocks == 6


def test_a_damaged_pin_is_damage(shelf: Shelf) -> None:
    pin = shelf.pin(IDS)
    (shelf.root / "pins" / f"{pin.id}.json").write_bytes(b"{}")
    verdict = verify(shelf.view(), Choice(), keep=False, on_damage=lambda _: None)
    assert verdict.damaged_pins == [pin.id] and not verdict.is_sound


def test_pinned_blocks_stay_whoever_removes(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    shelf.pin(IDS[:32])
    view = shelf.view()
    for ref in refs:
        shelf.expire(ref)
    assert collect(view).expired == 2
    removed = remove(condemn(view, view.held(Choice(tenant="default"))))
    assert (removed.blocks, removed.pinned_left) == (0, 2)
    assert [shelf.path(ref).exists() for ref in refs] == [True, True, False, False]


def test_identities_are_kept_once_and_the_newest_comes_first(shelf: Shelf) -> None:
    shelf.meet("other", block_tokens=32)
    first = known(shelf.root)
    assert [found.record.model for found in first] == ["small", "other"]
    assert first[0].identity == shelf.identity
    (shelf.root / "identities" / "newer.json").write_bytes(b'{"v": 2}')
    (shelf.root / "identities" / "junk.json").write_bytes(b"\xff")
    assert known(shelf.root) == first
