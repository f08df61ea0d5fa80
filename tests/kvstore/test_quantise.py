"""Quantised blocks: what the kernels rounded comes back bit for bit, and nothing that is not finite is stored."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantise import round_trip
from kvstore.codec import CODECS, BlockCodec
from kvstore.geometry import Geometry
from kvstore.quantise import NotFinitePage, Quantiser, quantiser_for
from kvstore.store import KVStore
from schemas.blob import HEADER_BYTES, DamagedBlob, ElementType, Quantisation
from schemas.errors import SetupError
from tests.kvstore.blocks import BLOCK_TOKENS, TTL_S, empty, kv_like, quantised, refs_of
from tests.kvstore.memory_tier import MemoryTier

TORCH = {
    ElementType.FLOAT32: torch.float32,
    ElementType.FLOAT16: torch.float16,
    ElementType.BFLOAT16: torch.bfloat16,
}
QUANTISATIONS = (Quantisation.INT8, Quantisation.INT4)

geometries = st.builds(
    Geometry,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([6, 16, 64]),
    st.sampled_from(ElementType),
    st.sampled_from(QUANTISATIONS),
)


def page_of(x: torch.Tensor) -> memoryview:
    return memoryview(x.contiguous().view(torch.uint8).numpy().tobytes())


def as_torch(page: memoryview, geometry: Geometry) -> torch.Tensor:
    return torch.frombuffer(page, dtype=TORCH[geometry.dtype]).view(-1, geometry.head_dim)


def there_and_back(page: memoryview, geometry: Geometry, tokens: int) -> memoryview:
    quantiser, buffer = Quantiser(geometry), memoryview(bytearray(len(page)))
    payload = quantiser.pack(page, tokens)
    buffer[: len(payload)] = payload
    quantiser.unpack(buffer, tokens)
    return buffer


@settings(max_examples=120, deadline=None)
@given(geometries, st.integers(1, 70), st.integers(0, 2**32 - 1), st.sampled_from([0, 0, -12, -20, -140, 100]))
def test_the_store_keeps_what_the_kernels_rounded(geometry: Geometry, tokens: int, seed: int, shift: int) -> None:
    """And of any other page it keeps what the kernels would round it to; sizes down to denormals."""
    dtype = TORCH[geometry.dtype]
    x = as_torch(memoryview(bytearray(kv_like(geometry, tokens, seed))), geometry).double().mul_(2.0**shift).float()
    if not torch.isfinite(x.to(dtype)).all():
        return
    rounded = round_trip(x.to(dtype).float(), geometry.quantisation.levels, dtype)
    for page in (page_of(rounded), page_of(x.to(dtype))):
        back = there_and_back(page, geometry, tokens)
        assert torch.equal(as_torch(back, geometry), rounded)  # as numbers: a denormal may become a negative zero
        payload = bytes(Quantiser(geometry).pack(back, tokens))
        assert len(payload) == geometry.payload_bytes(tokens) < len(page)
        assert payload == bytes(Quantiser(geometry).pack(page_of(rounded), tokens))
    assert there_and_back(page_of(rounded), geometry, tokens) == page_of(rounded)


def test_the_layout_is_the_documented_one() -> None:
    """By loops: after each [head, token, dim] of values its scales [head, token]; the even dim in the low nibble."""
    tokens = 5
    for quantisation in QUANTISATIONS:
        geometry = Geometry(2, 3, 8, ElementType.FLOAT32, quantisation)
        page = memoryview(bytearray(kv_like(geometry, tokens)))
        x = np.frombuffer(page, "<f4").reshape(2, 2, 3, tokens, 8)
        expected = b""
        for layer in range(2):
            for kv in range(2):
                scales = b""
                for head in range(3):
                    for token in range(tokens):
                        vector = x[layer, kv, head, token]
                        most = np.float32(np.abs(vector).max())
                        whole = [round(float(v / most * np.float32(quantisation.levels))) for v in vector]
                        if quantisation is Quantisation.INT8:
                            expected += bytes(w & 255 for w in whole)
                        else:
                            pairs = zip(whole[::2], whole[1::2], strict=True)
                            expected += bytes(even & 15 | (odd & 15) << 4 for even, odd in pairs)
                        bits = int((most / np.float32(quantisation.levels)).view(np.uint32)) & 0xFFFFFF80
                        scales += bits.to_bytes(4, "little")
                expected += scales
        assert bytes(Quantiser(geometry).pack(page, tokens)) == expected


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.id.name)
def test_a_block_is_stored_small_and_comes_back(codec: BlockCodec, quantisation: Quantisation) -> None:
    identity, geometry = quantised(quantisation)
    tier = MemoryTier()
    store = KVStore([tier], identity, geometry, codec)
    for ref in refs_of(range(20), identity=identity):
        page = there_and_back(kv_like(geometry, ref.num_tokens), geometry, ref.num_tokens)
        assert store.save(ref, page, TTL_S)
        blob = tier.blobs[ref.name][0]
        assert blob[6] == quantisation and len(blob) <= HEADER_BYTES + geometry.payload_bytes(ref.num_tokens)
        into = empty(ref, geometry)
        assert store.load(ref, into) and into == page


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_refused(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """CASES 11: it is not stored, and that is counted and said."""
    identity, geometry = quantised(Quantisation.INT8)
    ref = refs_of(range(BLOCK_TOKENS), identity=identity)[0]
    page = memoryview(bytearray(kv_like(geometry, BLOCK_TOKENS)))
    as_torch(page, geometry)[-1, 3] = bad
    tier = MemoryTier()
    store = KVStore([tier], identity, geometry)
    assert not store.save(ref, page, TTL_S)
    assert not tier.blobs and (store.counters.refused, store.counters.write_errors) == (1, 0)
    assert "NaN or infinity" in caplog.text
    with pytest.raises(NotFinitePage):
        Quantiser(geometry).pack(page, BLOCK_TOKENS)


def test_what_would_not_get_smaller_stops_the_start() -> None:
    for head_dim, quantisation in ((4, Quantisation.INT8), (2, Quantisation.INT4), (63, Quantisation.INT4)):
        with pytest.raises(SetupError, match=r"kv\.quantisation = none"):
            Geometry(2, 3, head_dim, ElementType.BFLOAT16, quantisation)
    identity, geometry = quantised(Quantisation.INT8)
    with pytest.raises(SetupError, match="INT8"):
        KVStore([], identity, Geometry(2, 3, 16, geometry.dtype))


@pytest.mark.parametrize("quantisation", [Quantisation.INT8, Quantisation.INT4])
def test_pages_that_hold_whole_numbers_are_stored_as_they_are(quantisation: Quantisation) -> None:
    """And refused, or taken for damage, where no quantiser would have made them."""
    geometry = Geometry(2, 3, 16, ElementType.FLOAT32, quantisation, holds_quantised=True)
    assert geometry.page_bytes(7) == geometry.payload_bytes(7) < Geometry(2, 3, 16, ElementType.FLOAT32).page_bytes(7)
    quantiser = quantiser_for(geometry)
    page = np.zeros(geometry.page_bytes(7), np.uint8)
    values, scales = geometry.values_and_scales(page, 7)
    values[...] = 3
    scales[...] = np.float32(0.5).reshape(1).view(np.uint8)
    assert quantiser is not None and bytes(quantiser.pack(page.data, 7)) == page.tobytes()
    before = page.tobytes()
    quantiser.unpack(page.data, 7)
    assert page.tobytes() == before
    for bad in (np.nan, np.inf, -0.5, 3e38, 0.0):
        scales[1, 2, 3] = np.float32(bad).reshape(1).view(np.uint8)
        with pytest.raises(NotFinitePage):
            quantiser.pack(page.data, 7)
        with pytest.raises(DamagedBlob):
            quantiser.unpack(page.data, 7)
