"""A row's K, V and logits are the same bits whatever else is computed, and however."""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.model import Model, Span
from tests.model.paths import Path, compute

LENGTH = 90
IDS = torch.arange(LENGTH) * 7919 + 5
GRID = 16


def check(model: Model, path: Path) -> None:
    logits, kv = compute(model, IDS % model.config.vocab_size, path)
    expected_logits, expected_kv = whole(model)
    assert torch.equal(kv, expected_kv)
    assert torch.equal(logits, expected_logits)
    assert logits.isfinite().all()


@cache
def whole(model: Model) -> tuple[Tensor, Tensor]:
    """Everything in one pass, alone, on one thread."""
    return compute(model, IDS % model.config.vocab_size, Path([LENGTH]))


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
PATHS = {
    "two threads": Path([LENGTH], num_threads=2),
    "chunks of 16": Path([16] * 5 + [10]),
    "small pages": Path([48, 42], page_tokens=16, num_threads=2),
    "large pages, with a mate": Path([64, 26], page_tokens=128, mate=37),
    "decoded from a block's end": Path([64] + [1] * 26, mate=1),
    "decoded over small pages": Path([48] + [1] * 42, page_tokens=16),
}


@DTYPES
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_the_default_model(dtype: str, path: Path, default_models: Callable[[str], Model]) -> None:
    check(default_models(dtype), path)


def rows_between(cuts: set[int]) -> list[int]:
    ends = [GRID * cut for cut in sorted(cuts)]
    return [end - start for start, end in pairwise([0, *ends, LENGTH])]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kind=st.sampled_from(["llama", "phi3", "qwen2", "qwen3"]),
    chunks=st.sets(st.integers(1, LENGTH // GRID)).map(rows_between),
    page_tokens=st.sampled_from([16, 48, 64, 128]),
    num_threads=st.integers(1, 2),
    mate=st.integers(0, 70),
)
def test_tiny_models(
    dtype: str,
    kind: str,
    chunks: list[int],
    page_tokens: int,
    num_threads: int,
    mate: int,
    tiny_models: Callable[..., Model],
) -> None:
    check(tiny_models(dtype, kind), Path(chunks, page_tokens, num_threads, mate))


@DTYPES
def test_a_batch_of_sequences_of_many_lengths(dtype: str, tiny_models: Callable[[str], Model]) -> None:
    """Sixteen sequences decode together; each then gives what it gives alone."""
    model = tiny_models(dtype)
    lengths = [1, 15, 16, 17, 31, 33, 47, 63, 64, 65, 80, 100, 127, 128, 129, 149]
    pool = model.new_pool(48, 64).fill_(math.nan)
    ids = [[(n * 7 + i) % 160 for i in range(n + 1)] for n in lengths]
    pages = [list(range(3 * i, 3 * i + 3)) for i in range(16)]
    prefills = [Span(0, n, own) for n, own in zip(lengths, pages, strict=True)]
    model.forward([token for text in ids for token in text[:-1]], prefills, pool, [])
    decodes = [Span(n, 1, own) for n, own in zip(lengths, pages, strict=True)]
    together = model.forward([text[-1] for text in ids], decodes, pool, None)
    for text, logits in zip(ids, together, strict=True):
        alone = model.forward(text, [Span(0, len(text), [0, 1, 2])], model.new_pool(3, 64), [len(text) - 1])
        assert torch.equal(alone[0], logits)


@DTYPES
def test_nan_stays_in_its_sequence(dtype: str, tiny_models: Callable[[str], Model]) -> None:
    """A page of NaN ruins the rows that see it and no others."""
    model = tiny_models(dtype)
    pool = model.new_pool(4, 64)
    pool[2] = math.nan
    ids = (torch.arange(100) * 7 % 160).tolist()
    spans = [Span(64, 20, [2, 3]), Span(0, 80, [0, 1])]
    logits = model.forward(ids, spans, pool, None)
    assert logits[:20].isnan().all()
    alone = model.forward(ids[20:], [Span(0, 80, [0, 1])], model.new_pool(2, 64), None)
    assert torch.equal(logits[20:], alone)


def test_logits_of_the_rows_asked_for(tiny_models: Callable[[str], Model]) -> None:
    model = tiny_models("float32")
    ids = (IDS[:40] % 160).tolist()
    spans, pool = [Span(0, 40, [0])], model.new_pool(1, 64)
    whole = model.forward(ids, spans, pool, None)
    assert whole.shape == (40, 160)
    assert torch.equal(model.forward(ids, spans, pool, [39, 0, 7]), whole[[39, 0, 7]])
    assert model.forward(ids, spans, pool, []).shape == (0, 160)
    assert model.forward([], [], pool, None).shape == (0, 160)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(0, 3, [0]), "2 token ids"),
        (Span(63, 2, [0]), "1 pages of 64"),
        (Span(255, 2, [0] * 5), "255 to 257"),
        (Span(-1, 2, [0]), "-1 to 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(span: Span, message: str, tiny_models: Callable[[str], Model]) -> None:
    model = tiny_models("float32")
    pool = model.new_pool(1, 64).fill_(7.0)
    with pytest.raises(ValueError, match=message):
        model.forward([1, 2], [span], pool, None)
    assert (pool == 7).all()


def test_a_pool_of_another_model_is_refused(tiny_models: Callable[[str], Model]) -> None:
    model = tiny_models("float32")
    for pool in (torch.zeros(1, 9, 2, 2, 64, 16), model.new_pool(1, 64).bfloat16(), model.new_pool(1, 40)):
        with pytest.raises(ValueError, match="does not fit"):
            model.forward([1], [Span(0, 1, [0])], pool, None)


def test_sizes(tiny_models: Callable[[str], Model]) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        model = tiny_models(dtype)
        assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * size
        assert model.new_pool(3, 32).shape == (3, 2, 2, 2, 32, 16)
