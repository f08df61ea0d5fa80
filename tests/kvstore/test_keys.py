import os
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore import keys
from kvstore.keys import Identity, block_refs, chain_refs, check_key_constant, root_of
from kvstore.tier import SHARED_TENANT
from schemas.blob import ElementType, Quantisation
from schemas.errors import InvalidRequest, SetupError
from schemas.subjects import check_slug
from tests.kvstore.blocks import IDENTITY, refs_of

# Keys are on people's disks: these constants change with the format version and for no other reason.
LAST_KEY = "f232dc781cacdd4089dbf9e248a06a76bdaa4c6b14e6f8186bdbe43b0a946624"
LAST_TOKEN_HASH = "2696bbd8ca1a5ebc7b7e836120a6f5c1"

PRINT_KEYS = """
import sys
from tests.kvstore.blocks import IDENTITY
from kvstore.keys import block_refs, check_key_constant, root_of
check_key_constant()
for ref in block_refs(root_of(IDENTITY, "default", "salt"), list(range(20)), 16):
    print(ref.key.hex(), ref.token_hash.hex())
"""


def uint32(value: int) -> bytes:
    return bytes([value & 255, value >> 8 & 255, value >> 16 & 255, value >> 24 & 255])


def test_keys_equal_the_definition_written_out_by_hand() -> None:
    """CASES 25: what a machine of any byte order must compute: no struct, no numpy."""
    named = [
        (b"format", uint32(1)),
        (b"fingerprint", b"modelfpr"),
        (b"tokenizer_hash", b"tokenizr"),
        (b"dtype", uint32(3)),
        (b"quantisation", uint32(0)),
        (b"arithmetic", b"arithmet"),
        (b"block_tokens", uint32(16)),
        (b"tenant", b"default"),
        (b"salt", b"salt"),
    ]
    root = blake3(b"".join(uint32(len(part)) + part for pair in named for part in pair)).digest()
    ids = [b"".join(map(uint32, block)) for block in (range(16), range(16, 20))]
    first = blake3(root + ids[0]).digest()
    second = blake3(first + ids[1]).digest()
    refs = block_refs(root_of(IDENTITY, "default", "salt"), range(20), 16)
    assert [ref.key for ref in refs] == [first, second]
    assert [ref.token_hash for ref in refs] == [blake3(ids[0]).digest()[:16], blake3(ids[0] + ids[1]).digest()[:16]]
    assert [(ref.start, ref.num_tokens, ref.end) for ref in refs] == [(0, 16, 16), (16, 4, 20)]
    assert (second.hex(), refs[1].token_hash.hex()) == (LAST_KEY, LAST_TOKEN_HASH)


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "random"])
def test_every_process_derives_the_same_keys(hash_seed: str | None) -> None:
    """CASES 25; end to end in tests/pipeline/test_two_processes.py."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        env["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS], env=env, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.split()[-2:] == [LAST_KEY, LAST_TOKEN_HASH]


def test_the_type_of_the_ids_does_not_matter() -> None:
    """CASES 25: lists, tuples, numpy and torch, of either byte order."""
    torch = pytest.importorskip("torch")
    ids = [0, 1, 49151, *range(40)]
    expected = refs_of(ids)
    arrays = [np.array(ids, dtype) for dtype in ("<i4", ">i4", "<i8", ">i8", "<u2", ">u2", "u4", "u8")]
    tensors = [torch.tensor(ids, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    strided = np.repeat(np.array(ids), 2)[::2]
    for given_ids in (tuple(ids), *arrays, *tensors, strided, [np.int64(i) for i in ids]):
        assert refs_of(given_ids) == expected


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**64], [1.0], ["1"], [None], [[1, 2]], [True], 3, "12"])
def test_what_is_no_token_id_is_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        refs_of(bad)


def test_no_ids_are_no_blocks() -> None:
    assert refs_of([]) == []


CHANGED = [
    {"fingerprint": b"othermdl"},
    {"tokenizer_hash": b"othertok"},
    {"arithmetic": b"otherari"},
    {"dtype": ElementType.FLOAT16},
    {"dtype": ElementType.FLOAT32},
    {"quantisation": Quantisation.INT8},
    {"quantisation": Quantisation.INT4},
    {"block_tokens": 32},
    {"format": 2},
]


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_every_part_of_the_identity_changes_every_key(change: dict[str, object]) -> None:
    other = Identity(**{name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__} | change)
    ids = range(64)
    mine, theirs = ({ref.key for ref in refs_of(ids, identity=identity)} for identity in (IDENTITY, other))
    assert not mine & theirs


def test_tenants_and_salts_share_nothing() -> None:
    ids = range(64)
    roots = [root_of(IDENTITY, tenant, salt) for tenant in ("a", "b", "ab", "") for salt in ("", "a", "b", "ab")]
    found = [ref.key for root in roots for ref in block_refs(root, ids, 16)]
    assert len(set(found)) == len(found)
    again = [ref.key for ref in block_refs(root_of(IDENTITY, "a", "b"), ids, 16)]
    assert set(again) <= set(found)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(0, 80))
def test_a_common_prefix_shares_its_whole_blocks_and_no_more(ids: list[int], cut: int) -> None:
    edited = [*ids[:cut], 2**31, *ids[cut:]] if ids[cut : cut + 1] != [2**31] else ids
    whole, other = refs_of(ids), refs_of(edited)
    shared = 0
    while shared < min(len(ids), len(edited)) and ids[shared] == edited[shared]:
        shared += 1
    for a, b in zip(whole, other, strict=False):
        same = a.num_tokens == b.num_tokens and a.end <= shared
        assert (a.key == b.key) == (a.token_hash == b.token_hash) == same


@given(st.lists(st.integers(0, 9), max_size=100), st.integers(0, 6), st.sampled_from(["", "salt"]))
def test_a_shared_beginning_is_everybodys_and_what_follows_is_not(ids: list[int], shared: int, salt: str) -> None:
    shared = min(shared, len(ids) // 16)
    ours, theirs = (chain_refs(IDENTITY, tenant, salt, ids, shared) for tenant in ("acme", "bolt"))
    plain = refs_of(ids, "acme")
    assert ours[:shared] == theirs[:shared] and {ref.tenant for ref in ours[:shared]} <= {SHARED_TENANT}
    assert not {ref.key for ref in ours[shared:]} & {ref.key for ref in theirs[shared:]}
    assert {ref.tenant for ref in ours[shared:]} <= {"acme"}
    if shared:
        assert not {ref.key for ref in ours} & {ref.key for ref in plain}
    elif not salt:
        assert ours == plain
    described = [(ref.token_hash, ref.start, ref.num_tokens) for ref in ours]
    assert described == [(ref.token_hash, ref.start, ref.num_tokens) for ref in plain], "a header says the same"


def test_the_block_after_a_shared_one_is_keyed_as_the_design_says() -> None:
    refs = chain_refs(IDENTITY, "acme", "salt", range(40), 1)
    shared = refs_of(range(16), SHARED_TENANT)[0]
    root = blake3(root_of(IDENTITY, "acme", "salt").key + shared.key).digest()
    second = blake3(root + b"".join(map(uint32, range(16, 32)))).digest()
    assert (refs[0], refs[1].key) == (shared, second)


def test_no_tenant_can_call_himself_everybody() -> None:
    with pytest.raises(InvalidRequest):
        check_slug(SHARED_TENANT, "tenant")


def test_a_partial_block_is_another_block_than_the_full_one() -> None:
    lengths = range(1, 17)
    assert len({refs_of(range(length))[0].key for length in lengths}) == len(lengths)


def test_the_start_up_check_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 25."""
    check_key_constant()
    assert keys.KEY_CONSTANT == LAST_KEY
    monkeypatch.setattr(keys, "block_key", lambda parent, ids: blake3(ids + parent).digest())
    with pytest.raises(SetupError, match="other block keys"):
        check_key_constant()


@pytest.mark.parametrize("change", [{"fingerprint": b"short"}, {"arithmetic": b""}, {"block_tokens": 8}])
def test_an_identity_that_the_header_cannot_hold_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(SetupError, match=next(iter(change))):
        Identity(**{name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__} | change)
