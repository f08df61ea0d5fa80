"""The page pool's books add up whatever is done to it."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernels.page_form import PageForm
from kvstore.keys import BlockRef
from services.engine.pages import OutOfPages, PagePool

NUM_PAGES, MAX_IDLE = 12, 4


def make_pool() -> PagePool:
    return PagePool(NUM_PAGES, PageForm(2, 1, 16, 4, torch.float32), max_idle=MAX_IDLE)


def ref(n: int, token_hash: bytes | None = None) -> BlockRef:
    return BlockRef("default", bytes([n]) * 32, token_hash or bytes([n]) * 16, 16 * n, 16)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.held: list[int] = []
        self.pinned: list[int] = []
        self.reserved = 0
        self.names: dict[int, int] = {}

    @precondition(lambda self: self.reserved < NUM_PAGES)
    @rule(n=st.integers(1, 4))
    def reserve(self, n):
        if self.pool.reserve(n):
            self.reserved += n

    @precondition(lambda self: len(self.held) < self.reserved)
    @rule()
    def take(self):
        page = self.pool.take()
        assert page not in self.held and page not in self.pinned
        self.held.append(page)
        self.names.pop(page, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(0, 30))
    def name(self, data, n):
        page = data.draw(st.sampled_from(self.held))
        self.pool.name(page, ref(n))

    @precondition(lambda self: len(self.held) < self.reserved)
    @rule(numbers=st.lists(st.integers(0, 30), max_size=6))
    def merge(self, numbers):
        room = self.reserved - len(self.held)
        self.held += self.pool.merge([ref(n) for n in numbers[:room]])

    @rule(n=st.integers(0, 30))
    def a_hit_needs_the_same_tokens(self, n):
        assert self.pool.merge([ref(n, b"other token ids!")]) == []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=4, unique=True))
        for page in pages:
            self.held.remove(page)
        self.pool.release(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.pool.pin(page)
        self.pinned.append(page)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        page = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(page)
        self.pool.unpin(page)

    @precondition(lambda self: self.reserved > len(self.held))
    @rule()
    def unreserve(self):
        self.pool.unreserve(1)
        self.reserved -= 1

    @invariant()
    def books_add_up(self):
        self.pool.check_integrity()
        assert self.pool.num_held == len({*self.held, *self.pinned})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_shared_page_is_the_same_memory():
    pool = make_pool()
    assert pool.reserve(2)
    page = pool.take()
    pool.data[page].fill_(3.0)
    pool.name(page, ref(1))
    assert pool.merge([ref(1), ref(2)]) == [page]
    pool.release([page, page])
    assert pool.merge([ref(1)]) == [page], "released blocks stay resident"


def test_a_chain_is_forgotten_from_its_end():
    pool = make_pool()
    assert pool.reserve(NUM_PAGES)
    chain = [ref(n) for n in range(MAX_IDLE)]
    pages = [pool.take() for _ in chain]
    for page, block in zip(pages, chain, strict=True):
        pool.name(page, block)
    pool.release(pages)
    taken = [pool.take() for _ in range(NUM_PAGES - MAX_IDLE)]  # all that are free
    for left in reversed(range(MAX_IDLE)):
        taken.append(pool.take())
        found = pool.merge(chain)
        assert found == pages[:left]
        pool.release(found)


def test_another_chains_block_under_the_same_key_ends_the_run():
    """CASES 5: the deepest block may be ours and one before it not, when keys collide."""
    pool = make_pool()
    assert pool.reserve(3)
    ours = [ref(0), ref(1), ref(2)]
    theirs = [ref(0), ref(1, b"other token ids!"), ref(2)]
    for block in theirs:
        pool.name(pool.take(), block)
    assert len(pool.merge(theirs)) == 3
    assert len(pool.merge(ours)) == 1


def test_more_than_everything_is_refused():
    pool = make_pool()
    assert not pool.reserve(NUM_PAGES + 1)
    assert pool.reserve(NUM_PAGES)
    for _ in range(NUM_PAGES):
        pool.take()
    with pytest.raises(OutOfPages):
        pool.take()


def test_the_payload_of_a_page_is_its_memory():
    pool = make_pool()
    pool.reserve(1)
    page = pool.take()
    (view,) = pool.leading(page, 16)
    payload = view.reshape(-1)
    assert len(payload) == pool.page_bytes == 2 * 2 * 1 * 16 * 4 * 4
    payload[:4] = list(b"\x00\x00\x80\x3f")
    assert pool.data[page, 0, 0, 0, 0, 0] == 1.0


@pytest.mark.parametrize("quantisation", ["none", "int8", "int4"])
def test_what_pages_hold_of_few_tokens_is_the_payload_of_their_blob(quantisation: str) -> None:
    """Values and scales lie in other places of a page than of a shorter blob."""
    form = PageForm(2, 3, 32, 16, quantisation=quantisation)
    pool = PagePool(2, form, max_idle=0)
    pool.data.view(torch.uint8).flatten().copy_(torch.arange(2 * pool.page_bytes) * 37 % 251)
    payload = np.zeros(form.token_bytes * 5, np.uint8)
    for target, source in zip(pool.payload_parts(payload, 5), pool.leading(1, 5), strict=True):
        target[...] = source
    if quantisation == "none":
        wanted = [pool.data[1, layer, side, :, :5] for layer in range(2) for side in range(2)]
    else:
        values, scales = form.values(pool.data), form.scales(pool.data)
        wanted = [held[1, layer, side, :, :5] for layer in range(2) for side in range(2) for held in (values, scales)]
    assert payload.tobytes() == b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in wanted)
    assert b"".join(part.tobytes() for part in pool.leading(1, 32)) != b"" and pool.page_bytes == 32 * form.token_bytes


def test_a_whole_quantised_page_is_one_piece() -> None:
    pool = PagePool(1, PageForm(1, 2, 16, 32, quantisation="int8"), max_idle=0)
    values, scales = pool.leading(0, 16)
    values[...], scales[...] = 1, 2
    page = pool.data[0].numpy().reshape(2, -1)
    assert (page[:, : 2 * 16 * 32] == 1).all() and (page[:, 2 * 16 * 32 :] == 2).all()
