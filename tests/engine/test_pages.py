"""The page pool's books add up whatever is done to it."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.pages import OutOfPages, PagePool

NUM_PAGES, MAX_IDLE = 12, 4


def make_pool() -> PagePool:
    return PagePool(NUM_PAGES, (2, 1, 16, 4), torch.float32, max_idle=MAX_IDLE)


def key(n: int) -> bytes:
    return bytes([n]) * 32


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
        self.pool.name(page, key(n), key(n)[:16])

    @precondition(lambda self: len(self.held) < self.reserved)
    @rule(n=st.integers(0, 30))
    def share(self, n):
        page = self.pool.share(key(n), key(n)[:16])
        if page is not None:
            self.held.append(page)

    @rule(n=st.integers(0, 30))
    def a_hit_needs_the_same_tokens(self, n):
        assert self.pool.share(key(n), b"other token ids!") is None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release([page])

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
    pool.name(page, key(1), key(1)[:16])
    assert pool.share(key(1), key(1)[:16]) == page
    pool.release([page, page])
    assert pool.share(key(1), key(1)[:16]) == page, "released blocks stay resident"


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
    payload = pool.leading(page, 16).reshape(-1)
    assert len(payload) == pool.page_bytes == 2 * 2 * 1 * 16 * 4 * 4
    payload[:4] = list(b"\x00\x00\x80\x3f")
    assert pool.data[page, 0, 0, 0, 0, 0] == 1.0
