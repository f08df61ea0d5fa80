"""Pages of one arithmetic as pages of another: rounded as torch rounds, always in the same way, or not at all."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantise import LEVELS, round_trip, whole_and_scale
from kvstore.converted import ConvertedStore, Converter
from kvstore.geometry import Geometry
from kvstore.quantise import NotFinitePage, Quantiser
from kvstore.store import KVStore
from schemas.blob import ElementType, Quantisation
from schemas.errors import Internal
from tests.kvstore.blocks import GEOMETRY, IDENTITY, chain

TORCH = {
    ElementType.FLOAT32: torch.float32,
    ElementType.FLOAT16: torch.float16,
    ElementType.BFLOAT16: torch.bfloat16,
}
TOKENS = 3
QUANTISED = (Quantisation.INT8, Quantisation.INT4)
SPECIAL = [0.0, -0.0, 1e-40, -1e-45, 65504.0, 1.0039062, 1.0117188, -3.3895314e38]


@dataclass(frozen=True)
class Form:
    dtype: ElementType
    quantisation: Quantisation = Quantisation.NONE
    holds: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(2, 2, 16, self.dtype, self.quantisation, self.holds)

    def page(self, x: torch.Tensor) -> memoryview:
        """`x: [4, 2, TOKENS, 16] float32` as a worker of this form keeps it."""
        levels = LEVELS.get(self.quantisation.name.lower(), 0)
        if not levels:
            return bytes_of(x.to(TORCH[self.dtype]))
        if not self.holds:
            return bytes_of(round_trip(x.clone(), levels, TORCH[self.dtype]))
        whole, scale = whole_and_scale(x, levels)
        packed = whole.numpy().view(np.uint8)
        if self.quantisation is Quantisation.INT4:
            packed = (packed[..., 0::2] & 15) | (packed[..., 1::2] << 4)
        sides = [
            np.concatenate([v.reshape(-1), s.numpy().view(np.uint8).reshape(-1)])
            for v, s in zip(packed, scale, strict=True)
        ]
        return memoryview(np.concatenate(sides))

    def values(self, page: memoryview) -> torch.Tensor:
        """What is attended to, in float32."""
        shape = (4, 2, TOKENS, 16)
        if not self.holds:
            return torch.frombuffer(bytearray(page), dtype=TORCH[self.dtype]).reshape(shape).float()
        out = bytearray(Geometry(2, 2, 16, ElementType.FLOAT32).page_bytes(TOKENS))
        out[: len(page)] = page
        Quantiser(Geometry(2, 2, 16, ElementType.FLOAT32, self.quantisation)).unpack(memoryview(out), TOKENS)
        return torch.frombuffer(out, dtype=torch.float32).reshape(shape)


def bytes_of(x: torch.Tensor) -> memoryview:
    return memoryview(x.contiguous().view(torch.uint8).numpy().tobytes())


def converted(x: torch.Tensor, source: Form, reader: Form) -> tuple[memoryview, memoryview]:
    page = source.page(x)
    into = memoryview(bytearray(reader.geometry.page_bytes(TOKENS)))
    Converter(source.geometry, reader.geometry).convert(page, into, TOKENS)
    return page, into


forms = st.builds(Form, st.sampled_from(ElementType)) | st.builds(
    Form, st.sampled_from([ElementType.FLOAT32, ElementType.BFLOAT16]), st.sampled_from(QUANTISED)
)
forms |= st.builds(Form, st.just(ElementType.FLOAT32), st.sampled_from(QUANTISED), st.just(True))


def random_kv(seed: int) -> torch.Tensor:
    x = torch.randn(4, 2, TOKENS, 16, generator=torch.Generator().manual_seed(seed)) * 3
    return x


@given(source=forms, reader=forms, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_reader_gets_what_it_would_keep_of_the_values(source: Form, reader: Form, seed: int) -> None:
    page, into = converted(random_kv(seed), source, reader)
    values = source.values(page)
    if reader.holds or reader.quantisation is Quantisation.NONE:
        expected = reader.page(values)
    else:  # first its own type, then its whole numbers
        expected = reader.page(values.to(TORCH[reader.dtype]).float())
    assert bytes(into) == bytes(expected)


@given(st.lists(st.floats(width=32), min_size=16, max_size=16), st.sampled_from(ElementType))
@settings(max_examples=200, deadline=None)
def test_any_number_is_rounded_as_torch_rounds(numbers: list[float], dtype: ElementType) -> None:
    x = (
        torch.tensor(numbers + SPECIAL * 2, dtype=torch.float32)
        .repeat(12)[: 4 * 2 * TOKENS * 16]
        .reshape(4, 2, TOKENS, 16)
    )
    _, into = converted(x, Form(ElementType.FLOAT32), Form(dtype))
    found, expected = Form(dtype).values(into), x.to(TORCH[dtype]).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("holds", [False, True])
def test_what_has_no_scale_is_refused(bad: float, holds: bool) -> None:
    x = random_kv(1)
    x[1, 1, 2, 3] = bad
    reader = Form(ElementType.FLOAT32, Quantisation.INT8, holds)
    with pytest.raises(NotFinitePage):
        converted(x, Form(ElementType.BFLOAT16), reader)


def test_only_pages_of_one_shape_are_converted() -> None:
    other: Any = Geometry(3, 2, 16, ElementType.FLOAT32)
    with pytest.raises(ValueError, match="cannot become pages"):
        ConvertedStore(empty_store(), Form(ElementType.FLOAT32).geometry, other)


def test_who_computes_otherwise_writes_nothing() -> None:
    geometry = Form(ElementType.FLOAT32).geometry
    reader = ConvertedStore(empty_store(), geometry, geometry)
    (ref,) = chain(1)
    with pytest.raises(Internal, match="may not write"):
        reader.save(ref, memoryview(bytes(geometry.page_bytes(16))), 60.0)


def empty_store() -> KVStore:
    return KVStore([], IDENTITY, GEOMETRY)
