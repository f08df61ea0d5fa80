"""The native step against the plain implementation of its arithmetic: whole models, however their rows come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.int8_arithmetic import Int8Arithmetic
from kernels.native.library import instruction_set, use
from services.engine.lease import Lease
from services.engine.model import Model, Span
from services.engine.native_model import NativeModel
from services.engine.reference_model import ReferenceModel
from tests.model.test_families import GGUFS, SIZES
from tests.model.tiny import TinyFiles, tiny_model
from tests.model.tiny_gguf_model import save_gguf

Pair = tuple[Model, Model]
LENGTHS = (100, 70, 40)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Type, str], Pair]:
    """`pairs(family, kind, quantisation)`: native and plain, made once."""
    files: dict[tuple[str, Type], TinyFiles] = {}
    made: dict[tuple[str, Type, str], Pair] = {}

    def make(family: str, kind: Type, quantisation: str) -> Pair:
        key = (family, kind, quantisation)
        if key not in made:
            if key[:2] not in files:
                path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
                sizes, extra = GGUFS[family]
                files[key[:2]] = save_gguf(path, tiny_model(**{**SIZES, **sizes}), kind, extra)
            arithmetic = Int8Arithmetic(quantisation)
            made[key] = NativeModel(files[key[:2]], arithmetic, lent=[0]), ReferenceModel(files[key[:2]], arithmetic)
        return made[key]

    return make


def texts(vocab_size: int) -> list[list[int]]:
    return [[(31 * i + 7 * n) % vocab_size for i in range(length)] for n, length in enumerate(LENGTHS)]


def whole(model: Model, page_tokens: int = 64) -> list[Tensor]:
    """The logits of every row of each text, computed alone and at once."""
    found = []
    for ids in texts(model.config.vocab_size):
        pages = range(-(-len(ids) // page_tokens))
        found.append(model.forward(ids, [Span(0, len(ids), pages)], model.new_pool(len(pages), page_tokens), None))
    return found


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("family", GGUFS)
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_each_family_and_format(family: str, kind: Type, pairs: Callable[..., Pair]) -> None:
    native, plain = pairs(family, kind, "none")
    for found, expected in zip(whole(native), whole(plain), strict=True):
        assert expected.isfinite().all() and expected.abs().max() > 1
        assert_same_bits(found, expected)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Passes of (text, rows), so that each text is computed to its end."""
    left = dict(enumerate(LENGTHS))
    passes = []
    while left:
        members = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, max_size=3, unique=True))
        step = []
        for text in members:
            rows = min(left[text], draw(st.sampled_from([1, 1, 2, 5, 16, 31, 64, 100])))
            step.append((text, rows))
            left[text] -= rows
            if not left[text]:
                del left[text]
        passes.append(step)
    return passes


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedules(),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from(["none", "int8", "int4"]),
    st.sampled_from(["portable", "avx2", "avx512"]),
    st.sampled_from([1, 2]),
)
def test_however_the_rows_come(
    pairs: Callable[..., Pair],
    schedule: list[list[tuple[int, int]]],
    page_tokens: int,
    quantisation: str,
    isa: str,
    num_threads: int,
) -> None:
    """Logits and pages, with NaN in every slot that was never written."""
    native, plain = pairs("qwen3", Type.Q4_1, quantisation)
    before = instruction_set()
    if not use(isa):
        return
    try:
        found, pool, pages = in_passes(native, schedule, page_tokens, num_threads)
    finally:
        use(before)
    for text, ids in enumerate(texts(plain.config.vocab_size)):
        expected_pool = plain.new_pool(len(pages[text]), page_tokens)
        span = Span(0, len(ids), range(len(pages[text])))
        assert_same_bits(found[text], plain.forward(ids, [span], expected_pool, None))
        for held, expected in zip(written(plain, pool[pages[text]]), written(plain, expected_pool), strict=True):
            full = len(ids) // page_tokens
            assert torch.equal(held[:full], expected[:full])
            used = len(ids) % page_tokens
            assert torch.equal(held[full:, :, :, :, :used], expected[full:, :, :, :, :used])


def in_passes(
    model: Model, schedule: list[list[tuple[int, int]]], page_tokens: int, num_threads: int
) -> tuple[list[Tensor], Tensor, list[list[int]]]:
    needed = [-(-length // page_tokens) for length in LENGTHS]
    order = list(range(sum(needed)))[::-1]
    pages = [[order.pop() for _ in range(count)] for count in needed]
    pool = model.new_pool(sum(needed), page_tokens)
    pool.view(torch.uint8).fill_(255)
    ids, done, logits = texts(model.config.vocab_size), [0] * len(LENGTHS), [[] for _ in LENGTHS]
    for step in schedule:
        spans, rows = [], []
        for text, count in step:
            spans.append(Span(done[text], count, pages[text][: -(-(done[text] + count) // page_tokens)]))
            rows += ids[text][done[text] : done[text] + count]
        model.use_threads(Lease(own=1, lent=num_threads - 1, revoked=0))
        found = model.forward(rows, spans, pool, None)
        for text, count in step:
            done[text] += count
            logits[text].append(found[:count])
            found = found[count:]
    return [torch.cat(parts) for parts in logits], pool, pages


def written(model: Model, pool: Tensor) -> list[Tensor]:
    """What pages hold, `[P, L, 2, H, T, ...]` each, as whole numbers, so that NaN compares equal to itself."""
    form = model.page_form(model.page_form(16).tokens_in(pool))
    if form.is_quantised:
        return [form.values(pool), form.scales(pool).contiguous().view(torch.int32)]
    return [pool.view(torch.int16)]


def test_a_pass_that_does_not_fit_is_refused(pairs: Callable[..., Pair]) -> None:
    native, _ = pairs("llama", Type.Q4_1, "none")
    pool = native.new_pool(1, 64)
    for ids, span in (
        ([1] * 65, Span(0, 65, [0])),
        ([1, 2], Span(0, 3, [0])),
        ([160], Span(0, 1, [0])),
        ([-1], Span(0, 1, [0])),
    ):
        with pytest.raises(ValueError, match=r"rows|token ids"):
            native.forward(ids, [span], pool, None)
    other: Any = pool.float()
    with pytest.raises(ValueError, match="does not fit"):
        native.forward([1], [Span(0, 1, [0])], other, None)
