"""Real blobs, changed at random: each loads with the very bytes that were saved, or is a counted miss."""

from functools import cache

from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import CODECS
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity
from kvstore.store import KVStore
from schemas.blob import DIGESTED_BYTES, HEADER_BYTES, Codec, Quantisation
from tests.kvstore.blocks import GEOMETRY, chain, empty, payload_of, quantised
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import Clock, Life

REF: BlockRef = chain(2)[1]
Form = tuple[Codec, Quantisation]

forms = st.tuples(st.sampled_from(Codec), st.sampled_from(Quantisation))
places = st.floats(0, 1, exclude_max=True)
edits = st.one_of(
    st.tuples(st.just("set"), places, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), places, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("delete"), places, st.integers(1, 200)),
    st.tuples(st.just("zero"), places, st.integers(1, 400)),
    st.tuples(st.just("header"), st.integers(0, DIGESTED_BYTES - 1), st.integers(0, 255)),
    st.tuples(st.just("cut"), places, st.none()),
    st.tuples(st.just("swap"), places, places),
)


@cache
def sound(form: Form) -> tuple[bytes, bytes]:
    """The blob of a block, and what loads from it."""
    tier = MemoryTier()
    store = store_of(form, tier)
    assert store.save(REF, payload_of(REF), 1000)
    into = empty(REF)
    assert store.load(REF, into)
    return tier.blobs[REF.name][0], bytes(into)


def store_of(form: Form, tier: MemoryTier) -> KVStore:
    identity, geometry = quantised(form[1])
    return KVStore([tier], identity, geometry, CODECS[form[0]])


def edited(blob: bytes, edit: tuple) -> bytes:  # type: ignore[type-arg]
    kind, where, what = edit
    at = where if kind == "header" else int(where * len(blob))
    match kind:
        case "set":
            return blob[:at] + what + blob[at + len(what) :]
        case "insert":
            return blob[:at] + what + blob[at:]
        case "delete":
            return blob[:at] + blob[at + what :]
        case "zero":
            return (blob[:at] + bytes(what) + blob[at + what :])[: len(blob)]
        case "header":
            return blob[:at] + bytes([what]) + blob[at + 1 :]
        case "cut":
            return blob[:at]
        case _:
            other = int(what * len(blob))
            low, high = sorted((at, other))
            return blob[:low] + blob[high:] + blob[low:high]


def load(form: Form, blob: bytes) -> tuple[bool, bytes, KVStore]:
    tier = MemoryTier()
    tier.blobs[REF.name] = (blob, Life(0.0, Clock().now * 2))
    store, into = store_of(form, tier), empty(REF)
    found = store.load(REF, into)
    return found, bytes(into), store


@settings(max_examples=600, deadline=None)
@given(forms, st.lists(edits, min_size=1, max_size=3))
def test_a_changed_blob_is_a_counted_miss(form: Form, changes: list) -> None:  # type: ignore[type-arg]
    """Whatever happened to it by accident: the digest finds it."""
    blob, page = sound(form)
    changed = blob
    for change in changes:
        changed = edited(changed, change)
    found, into, store = load(form, changed)
    if changed == blob:
        assert found and into == page
    else:
        assert not found and (store.counters.damaged, store.counters.misses) == (1, 1)


@settings(max_examples=600, deadline=None)
@given(forms, st.lists(edits, min_size=1, max_size=3))
def test_with_a_digest_that_fits_it_loads_or_is_a_counted_miss(form: Form, changes: list) -> None:  # type: ignore[type-arg]
    """Whatever somebody makes of it: no other exception, and never into more than the block's own memory."""
    changed = sound(form)[0]
    for change in changes:
        changed = edited(changed, change)
    if len(changed) < HEADER_BYTES:
        return
    fields, stored = changed[:DIGESTED_BYTES], changed[HEADER_BYTES:]
    found, _, store = load(form, fields + blake3(fields + stored).digest() + stored)
    assert store.counters.hits == found
    assert store.counters.damaged + store.counters.mismatched == store.counters.misses == (not found)


@settings(max_examples=300, deadline=None)
@given(forms, st.binary(max_size=600))
def test_any_payload_decodes_or_is_damage(form: Form, stored: bytes) -> None:
    blob = sound(form)[0]
    fields = blob[:44] + len(stored).to_bytes(4, "little") + blob[48:DIGESTED_BYTES]
    found, _, store = load(form, fields + blake3(fields + stored).digest() + stored)
    assert not found and store.counters.damaged == 1


def test_the_forms_differ() -> None:
    blobs = {form: sound(form)[0] for form in ((codec, q) for codec in Codec for q in Quantisation)}
    assert len(set(blobs.values())) == len(blobs)
    identity: tuple[Identity, Geometry] = quantised(Quantisation.NONE)
    assert identity[1] == GEOMETRY
