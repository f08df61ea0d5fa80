"""Why a block would be found or not: each reason by name."""

from pathlib import Path

import pytest

from kvstore.keys import SHARED_TENANT
from schemas.blob import ElementType, Quantisation
from services.kv.explain import BlockFate, Explainer, Explanation, Question
from tests.kv.shelf import Shelf

IDS = list(range(100, 170))  # four blocks of 16 and one of 6


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def explain(
    shelf: Shelf,
    ids: list[int] = IDS,
    tenant: str = "default",
    salt: str = "",
    others: dict[bytes, list[int]] | None = None,
) -> Explanation:
    question = Question(shelf.known(), tenant, salt, ids, (others or {}).get)
    return Explainer(shelf.view(), question).explain()


def states(found: Explanation) -> list[str]:
    return [fate.state for fate in found.blocks]


def test_what_is_held_is_found_all_but_the_last_token(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    found = explain(shelf)
    assert states(found) == ["held"] * 5 and all(fate.usable for fate in found.blocks)
    assert [fate.key for fate in found.blocks] == [ref.key.hex() for ref in refs]
    assert [(fate.start, fate.end) for fate in found.blocks] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 70)]
    assert (found.prompt_tokens, found.cached_tokens) == (70, 69)
    assert {tuple(fate.tiers) for fate in found.blocks} == {("nvme",)}


def test_what_follows_a_gap_is_held_and_of_no_use(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    shelf.path(refs[2]).unlink()
    found = explain(shelf)
    assert states(found) == ["held", "held", "never_stored", "held", "held"]
    assert [fate.usable for fate in found.blocks] == [True, True, False, False, False]
    assert found.cached_tokens == 32


def test_damage_expiry_and_quarantine_are_told(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    shelf.damage(refs[0])
    shelf.expire(refs[1])
    shelf.damage(refs[2])
    shelf.view().tiers[0].quarantine(refs[2].name)
    shelf.path(refs[3]).write_bytes(b"")
    found = explain(shelf)
    assert states(found) == ["damaged", "expired", "damaged", "damaged", "held"]
    assert "digest" in found.blocks[0].detail and "quarantine" in found.blocks[2].detail
    assert found.cached_tokens == 0


def test_a_reason_that_a_tier_remembers_is_told(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = shelf.store(IDS)
    view = shelf.view()
    for ref in refs[1:]:
        shelf.path(ref).unlink()
    reasons = {refs[1].name: "evicted", refs[2].name: "erased"}
    monkeypatch.setattr(view.tiers[0], "reason_of", reasons.get)
    found = Explainer(view, Question(shelf.known(), "default", "", IDS, lambda _: None)).explain()
    assert states(found) == ["held", "evicted", "erased", "never_stored", "never_stored"]


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"fingerprint": b"othermdl"}, "other_model", "model other"),
        ({"dtype": ElementType.FLOAT32, "arithmetic": b"f32arith"}, "other_dtype", "float32"),
        ({"quantisation": Quantisation.INT8}, "other_quantisation", "int8"),
        ({"arithmetic": b"otherari"}, "other_arithmetic", "bfloat16.of other"),
        ({"block_tokens": 32}, "other_block_tokens", "32"),
    ],
)
def test_what_another_identity_holds_is_told(shelf: Shelf, change: dict[str, object], state: str, words: str) -> None:
    other = shelf.meet("other", **change)
    if other.quantisation is Quantisation.NONE:
        shelf.store(IDS[:64], identity=other)
    else:  # no codec for it yet: what lies there does not matter here
        _put(shelf, other)
    found = explain(shelf)
    assert states(found) == [state] * 4 + ["never_stored"]
    assert words in found.blocks[0].detail and found.cached_tokens == 0


def _put(shelf: Shelf, other: object) -> None:
    from kvstore.keys import Identity, chain_refs

    assert isinstance(other, Identity)
    for ref in chain_refs(other, "default", "", IDS[:64]):
        shelf.path(ref).parent.mkdir(parents=True, exist_ok=True)
        shelf.path(ref).write_bytes(b"whatever")


def test_another_tokenizer_is_asked_for_its_own_tokens(shelf: Shelf) -> None:
    other = shelf.meet("other", tokenizer_hash=b"othertok")
    theirs = list(range(500, 564))
    shelf.store(theirs, identity=other)
    assert states(explain(shelf)) == ["never_stored"] * 5
    assert states(explain(shelf, others={b"othertok": theirs})) == ["other_tokenizer"] * 4 + ["never_stored"]


def test_other_tenants_and_salts_are_told_apart(shelf: Shelf) -> None:
    shelf.store(IDS[:32], "acme")
    found = explain(shelf)
    assert states(found) == ["other_tenant"] * 2 + ["never_stored"] * 3
    assert found.blocks[0].detail == "tenant acme"
    assert states(explain(shelf, tenant="acme"))[:2] == ["held", "held"]
    assert states(explain(shelf, tenant="acme", salt="mine"))[:2] == ["other_salt", "other_salt"]


def test_pins_and_shared_blocks_are_named(shelf: Shelf) -> None:
    pin = shelf.pin(IDS[:40], SHARED_TENANT)
    shelf.store(IDS[:32], SHARED_TENANT)
    found = explain(shelf, tenant="acme")
    fates: list[BlockFate] = found.blocks
    assert [(fate.state, fate.tenant, fate.pin) for fate in fates[:3]] == [
        ("held", SHARED_TENANT, pin.id),
        ("held", SHARED_TENANT, pin.id),
        ("never_stored", "acme", None),
    ]
    assert found.cached_tokens == 32
