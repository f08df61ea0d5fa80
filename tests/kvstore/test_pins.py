"""Pins as files, and what of a prompt is public."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import chain_refs
from kvstore.pins import FOLDER, Pin, PinBook, new_pin, pinned_ids
from kvstore.shared_prefix import SharedPrefixes
from kvstore.tier import SHARED_TENANT
from tests.kvstore.blocks import IDENTITY

IDS = list(range(40))


@pytest.fixture
def book(tmp_path: Path) -> PinBook:
    return PinBook(tmp_path)


def pin_of(text: str = "be brief", tenant: str = "acme", created_at: float = 1.0) -> Pin:
    return new_pin("system", "tiny", tenant, "", text, created_at)


def add(book: PinBook, pin: Pin, ids: list[int] = IDS) -> Pin:
    book.add(pin, pinned_ids(IDENTITY.tokenizer_hash, ids))
    return pin


def test_a_pin_comes_and_goes(book: PinBook, tmp_path: Path) -> None:
    assert (book.pins(), book.stamp()) == ([], 0)
    pin = add(book, pin_of())
    assert book.pins() == [pin] and book.stamp() > 0
    assert book.ids(pin, IDENTITY.tokenizer_hash) == IDS
    assert book.ids(pin, b"othertok") is None
    assert book.remove(pin.id) and not book.remove(pin.id)
    assert book.pins() == [] and list((tmp_path / FOLDER).iterdir()) == []


def test_the_same_text_for_another_is_another_pin(book: PinBook) -> None:
    texts = [pin_of(), pin_of(tenant="bolt"), pin_of("be terse"), new_pin("prompt", "tiny", "acme", "", "be brief", 1)]
    texts += [
        new_pin("system", "tiny", "acme", "salt", "be brief", 1),
        new_pin("system", "big", "acme", "", "be brief", 1),
    ]
    for pin in texts:
        add(book, pin)
    assert len(book.pins()) == len(texts)
    assert add(book, pin_of(created_at=2.0)).id == pin_of().id


@pytest.mark.parametrize("change", [{"text": "be rude"}, {"text_hash": "00"}, {"tenant": "bolt"}])
def test_a_text_that_was_changed_does_not_count(book: PinBook, tmp_path: Path, change: dict[str, str]) -> None:
    pin = add(book, pin_of())
    file = tmp_path / FOLDER / f"{pin.id}.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(pin, **change)))
    assert (book.pins(), book.damaged()) == ([], [pin.id])


@pytest.mark.parametrize("junk", [b"", b"{", b"[" * 100_000, b"\xff", b'{"v": 2}'])
def test_junk_does_not_count(book: PinBook, tmp_path: Path, junk: bytes) -> None:
    pin = add(book, pin_of())
    (tmp_path / FOLDER / f"{pin.id}.json").write_bytes(junk)
    assert (book.pins(), book.damaged()) == ([], [pin.id])
    assert book.remove(pin.id)


def test_tokens_that_were_changed_do_not_count(book: PinBook, tmp_path: Path) -> None:
    pin = add(book, pin_of())
    (file,) = (tmp_path / FOLDER).glob("*.ids")
    file.write_bytes(file.read_bytes().replace(b"[0,1,", b"[1,0,"))
    assert book.ids(pin, IDENTITY.tokenizer_hash) is None
    assert book.refs("tiny", IDENTITY) == [(pin, [])]


def test_the_blocks_of_a_pin_are_those_that_a_request_asks_for(book: PinBook) -> None:
    """Also where a shared pin begins as it does."""
    own = add(book, pin_of())
    assert book.refs("tiny", IDENTITY) == [(own, chain_refs(IDENTITY, "acme", "", IDS[:32]))]
    shared = add(book, pin_of("public", SHARED_TENANT, 2.0), [*IDS[:20], 77, 78])
    public = book.shared("tiny", IDENTITY.tokenizer_hash)
    assert public.num_blocks(IDS, 16) == 1
    refs = {pin.id: refs for pin, refs in book.refs("tiny", IDENTITY)}
    assert refs[own.id] == chain_refs(IDENTITY, "acme", "", IDS[:32], 1)
    assert refs[shared.id] == refs[own.id][:1]
    assert book.shared("big", IDENTITY.tokenizer_hash) == SharedPrefixes()


ids_of = st.lists(st.integers(0, 2), max_size=80)


@given(st.lists(ids_of, max_size=3), ids_of, st.integers(0, 80))
def test_a_cut_prompt_begins_with_the_same_chain(prefixes: list[list[int]], ids: list[int], cut: int) -> None:
    public = SharedPrefixes(tuple(map(tuple, prefixes)))
    whole = chain_refs(IDENTITY, "acme", "", ids, public.num_blocks(ids, 16))
    part = chain_refs(IDENTITY, "acme", "", ids[:cut], public.num_blocks(ids[:cut], 16))
    full = [ref for ref in part if ref.num_tokens == 16]
    assert full == whole[: len(full)]


@given(st.lists(st.integers(0, 9), min_size=16, max_size=80), st.integers(0, 79), ids_of)
def test_no_more_is_public_than_was_pinned(prefix: list[int], cut: int, rest: list[int]) -> None:
    """Of a prompt that leaves the pinned text somewhere, to the block."""
    cut = min(cut, len(prefix))
    ids = [*prefix[:cut], 99, *rest]
    assert SharedPrefixes((tuple(prefix),)).num_blocks(ids, 16) == cut // 16
    assert SharedPrefixes((tuple(prefix),)).num_blocks(prefix[:cut], 16) == cut // 16
    assert SharedPrefixes((tuple(prefix), tuple(ids))).num_blocks(ids, 16) == len(ids) // 16
