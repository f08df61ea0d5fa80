"""A token's K, V and logits are the same bits, however its prompt was cut, batched, restored and computed.

Random cases over the default model in int8: the split into passes, batch mates, threads and cores that are taken back,
page sizes, beginnings that were stored, instruction sets. The other models are in test_native_model.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.int8_arithmetic import Int8Arithmetic
from kernels.native.library import ffi, instruction_set, use
from services.engine.lease import Lease
from services.engine.model import Span
from services.engine.native_model import NativeModel
from tests.models.default_model import default_model

NUM_PROMPTS, LONGEST = 6, 330
CUTS = (1, 1, 1, 2, 3, 7, 8, 9, 31, 33, 64, 100, 256)
SLOW_ISA = "portable"
LONGEST_SLOW = 12


@dataclass
class Text:
    """A prompt and what it gives when computed alone and at once: logits `[T, V]`, K and V `[L, 2, H, T, D]`."""

    ids: list[int]
    logits: Tensor
    kv: Tensor


@dataclass
class Run:
    """One text on its way through a case. `logits`: of the rows that were asked for, by position."""

    text: Text
    length: int
    done: int
    pages: list[int]
    logits: dict[int, Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def model() -> NativeModel:
    """One thread of its own, and one that may be lent."""
    return NativeModel(default_model(), Int8Arithmetic(), lent=[0])


@pytest.fixture(scope="module")
def texts(model: NativeModel) -> list[Text]:
    rng = random.Random(1)
    found = []
    for number in range(NUM_PROMPTS):
        ids = [rng.randrange(model.config.vocab_size) for _ in range(rng.randrange(LONGEST // 2, LONGEST))]
        if number % 2:  # the same beginning as the one before
            ids[:150] = found[-1].ids[:150]
        pool = model.new_pool(-(-len(ids) // 64), 64)
        logits = model.forward(ids, [Span(0, len(ids), range(pool.shape[0]))], pool, None)
        found.append(Text(ids, logits, in_order(pool, range(pool.shape[0]), len(ids))))
    return found


@pytest.fixture
def instruction_sets() -> Iterator[list[str]]:
    best = instruction_set()
    yield [name for name in ("avx512", "avx2", SLOW_ISA) if use(name)]
    use(best)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 51))])
def test_twenty_random_cases(model: NativeModel, texts: list[Text], instruction_sets: list[str], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        isa = rng.choices(instruction_sets, [8, 8, 1][: len(instruction_sets)])[0]
        assert use(isa)
        case(model, texts, rng, LONGEST_SLOW if isa == SLOW_ISA else LONGEST)


def test_another_order_of_additions_is_seen(model: NativeModel, texts: list[Text]) -> None:
    """What the comparison would find: one value of K, off by its last bit."""
    text = texts[0]
    pool = model.new_pool(-(-len(text.ids) // 64), 64)
    model.forward(text.ids[:64], [Span(0, 64, [0])], pool, [])
    pool.view(torch.int16)[0, 0, 0, 0, 0, 0] ^= 1
    found = model.forward(text.ids[64:70], [Span(64, 6, [0, 1])], pool, None)
    assert not torch.equal(found, text.logits[64:70])


def case(model: NativeModel, texts: list[Text], rng: random.Random, longest: int) -> None:
    page_tokens = rng.choice([16, 32, 48, 64, 128])
    pool = model.new_pool(NUM_PROMPTS * -(-LONGEST // page_tokens), page_tokens)
    pool.view(torch.uint8).fill_(255)  # NaN in every slot that was never written
    free = list(range(pool.shape[0]))
    rng.shuffle(free)
    runs = [start(text, rng, pool, free, page_tokens, longest) for text in rng.sample(texts, rng.randint(1, 4))]
    while going := [run for run in runs if run.done < run.length]:
        one_pass(model, rng.sample(going, rng.randint(1, len(going))), rng, pool, page_tokens)
    for run in runs:
        for position, logits in run.logits.items():
            assert torch.equal(logits, run.text.logits[position]), position
        assert torch.equal(in_order(pool, run.pages, run.length), run.text.kv[:, :, :, : run.length])


def start(text: Text, rng: random.Random, pool: Tensor, free: list[int], page_tokens: int, longest: int) -> Run:
    """Cold, or with a beginning of whole pages that was stored."""
    length = rng.randint(1, min(longest, len(text.ids)))
    pages = [free.pop() for _ in range(-(-length // page_tokens))]
    warm = rng.choice([0, 0, rng.randint(0, (length - 1) // page_tokens)])
    for number, page in enumerate(pages[:warm]):
        pool.view(torch.int16)[page] = text.kv[:, :, :, number * page_tokens : (number + 1) * page_tokens]
    return Run(text, length, warm * page_tokens, pages)


def one_pass(model: NativeModel, runs: list[Run], rng: random.Random, pool: Tensor, page_tokens: int) -> None:
    ids: list[int] = []
    spans: list[Span] = []
    owners: list[tuple[int, Run, int]] = []
    for run in runs:
        count = min(run.length - run.done, rng.choice(CUTS))
        end = run.done + count
        asked = {end - 1, *rng.sample(range(run.done, end), min(count, 2))}
        owners += [(len(ids) + position - run.done, run, position) for position in asked]
        spans.append(Span(run.done, count, run.pages[: -(-end // page_tokens)]))
        ids += run.text.ids[run.done : end]
        run.done = end
    owners.sort(key=lambda owner: owner[0])
    revoked = ffi.new("int32_t *", rng.choice([0, 0, 1]))
    model.use_threads(Lease(own=1, lent=rng.choice([0, 1]), revoked=int(ffi.cast("intptr_t", revoked))))
    found = model.forward(ids, spans, pool, [row for row, _, _ in owners])
    for (_, run, position), logits in zip(owners, found, strict=True):
        run.logits[position] = logits


def in_order(pool: Tensor, pages: range | list[int], length: int) -> Tensor:
    """`[L, 2, H, T, D]` of the first `length` tokens, as whole numbers: NaN would differ from itself."""
    kv = pool[list(pages)].permute(1, 2, 3, 0, 4, 5)
    return kv.reshape(*kv.shape[:3], -1, kv.shape[-1])[:, :, :, :length].contiguous().view(torch.int16)
