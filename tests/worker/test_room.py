"""Room and admission: first come, first served, and a suspect runs alone."""

import asyncio

import pytest
import torch

from kernels.page_form import PageForm
from services.engine.pages import PagePool
from services.worker.admission import Admission
from services.worker.room import Room


def make_room(num_pages: int = 10, max_sequences: int = 4) -> tuple[Room, PagePool]:
    pool = PagePool(num_pages, PageForm(1, 1, 16, 4, torch.float32), max_idle=0)
    return Room(pool, max_sequences), pool


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_order_and_nobody_overtakes():
    room, pool = make_room()
    first = await room.enter(1, 8)
    large = asyncio.create_task(room.enter(1, 10))
    small = asyncio.create_task(room.enter(1, 1))
    await settled()
    assert not large.done() and not small.done(), "a small one behind a large one waits too"
    first.close()
    await settled()
    assert large.done() and not small.done()
    (await large).close()
    (await small).close()
    assert (room.num_sequences, pool.num_unreserved) == (0, 10)


async def test_two_that_grow_do_not_block_each_other():
    room, _ = make_room()
    permits = [await room.enter(1, 5), await room.enter(1, 5)]
    grown = [asyncio.create_task(permit.resize(2, 10)) for permit in permits]
    await settled()
    assert [task.done() for task in grown] == [True, False]
    permits[0].close()
    await asyncio.wait_for(grown[1], 10)
    permits[1].close()
    assert room.num_sequences == 0


async def test_a_cancelled_waiter_leaves_nothing_behind():
    room, pool = make_room()
    first = await room.enter(1, 10)
    waiting = asyncio.create_task(room.enter(1, 1))
    behind = asyncio.create_task(room.enter(1, 2))
    await settled()
    waiting.cancel()
    first.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (await asyncio.wait_for(behind, 10)).close()
    assert (room.num_sequences, pool.num_unreserved) == (0, 10)


async def test_cancelled_in_the_moment_of_its_turn():
    room, pool = make_room()
    first = await room.enter(1, 10)
    waiting = asyncio.create_task(room.enter(1, 10))
    await settled()
    first.close()  # its turn comes...
    waiting.cancel()  # ...and it never learns of it
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (room.num_sequences, pool.num_unreserved) == (0, 10)


async def test_shrinking_makes_room_at_once():
    room, _ = make_room()
    permit = await room.enter(1, 10)
    waiting = asyncio.create_task(room.enter(1, 6))
    await permit.resize(1, 4)
    (await asyncio.wait_for(waiting, 10)).close()
    permit.close()
    permit.close()
    assert room.num_sequences == 0


async def test_a_suspect_waits_for_the_others_and_the_others_for_it():
    admission = Admission()
    await admission.enter("a", suspect=False)
    suspect = asyncio.create_task(admission.enter("s", suspect=True))
    later = asyncio.create_task(admission.enter("b", suspect=False))
    opened = asyncio.create_task(admission.wait_open())
    await settled()
    assert not suspect.done() and not later.done() and not opened.done()
    admission.leave("a")
    await settled()
    assert suspect.done() and not later.done() and not opened.done()
    admission.clear("s")  # it made an event
    await asyncio.wait_for(asyncio.gather(later, opened), 10)


async def test_suspects_run_one_after_the_other():
    admission = Admission()
    await admission.enter("first", suspect=True)
    second = asyncio.create_task(admission.enter("second", suspect=True))
    await settled()
    assert not second.done()
    admission.clear("first")
    await settled()
    assert not second.done(), "the first still runs"
    admission.leave("first")
    await asyncio.wait_for(second, 10)


async def test_a_suspect_that_is_cancelled_while_waiting_lets_others_in():
    admission = Admission()
    await admission.enter("a", suspect=False)
    suspect = asyncio.create_task(admission.enter("s", suspect=True))
    await settled()
    suspect.cancel()
    await asyncio.wait_for(admission.enter("b", suspect=False), 10)


async def test_pages_that_come_free_by_themselves_let_waiters_in():
    """A block is still being stored when its job ends: nobody but the pool knows when that is over."""
    room, pool = make_room()
    permit = await room.enter(1, 10)
    page = pool.take()
    pool.pin(page)
    pool.release([page])
    permit.close()
    waiting = asyncio.create_task(room.enter(1, 10))
    await settled()
    assert not waiting.done()
    pool.unpin(page)
    (await asyncio.wait_for(waiting, 10)).close()


async def test_who_keeps_his_promise_waits_while_pages_are_promised_twice():
    room, pool = make_room()
    permit = await room.enter(1, 10)
    page = pool.take()
    pool.pin(page)
    pool.release([page])
    again = asyncio.create_task(permit.resize(1, 10))
    await settled()
    assert not again.done(), "with all ten and the one that is being stored there would be eleven"
    pool.unpin(page)
    await asyncio.wait_for(again, 10)
    permit.close()
    assert pool.num_unreserved == 10


async def test_waiting_for_work_ends_when_somebody_wants_the_room():
    room, _ = make_room(max_sequences=2)
    for_ever = asyncio.Event()
    idle = await room.enter(1, 1)
    waiting = asyncio.create_task(room.unless_wanted(for_ever.wait()))
    await settled()
    wide = asyncio.create_task(room.enter(2, 2))
    assert await asyncio.wait_for(waiting, 10) is None
    assert await room.unless_wanted(for_ever.wait()) is None, "somebody waits already"
    idle.close()
    (await asyncio.wait_for(wide, 10)).close()
    for_ever.set()
    assert await room.unless_wanted(for_ever.wait())
