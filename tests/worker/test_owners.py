"""A job whose gateway is gone ends, unless its reader has gone on to another one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.beat import Beat
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.watchers import WatchAnswers
from services.worker.runs import Runs
from tests.bus.throwaway import throwaway_server


class Orphan:
    """What `Runs` needs of a run whose owner is silent."""

    tenant, job, owner, died = "default", "j", "gateway-gone", False

    def owned_by(self, owner: str) -> None:
        self.owner = owner

    def owner_died(self) -> None:
        self.died = True


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    with throwaway_server(tmp_path) as server:
        async with await Bus.connect(server.url, "gateway-2") as bus:
            yield bus


async def test_it_is_asked_who_waits(bus: Bus) -> None:
    table = BeatTable(bus)
    await table.start()
    runs, orphan, watched = Runs(bus, table), Orphan(), True
    run: Any = orphan
    beats = BeatPublisher(bus, lambda: Beat(process="gateway-2", role="gateway", state="ok"))
    answers = WatchAnswers(bus, lambda tenant, job: watched and (tenant, job) == ("default", "j"))
    await answers.start()
    await beats.start()
    await table.wait_for(lambda heard: bool(heard.alive("gateway")))
    await runs._pass_on(run)
    assert (orphan.owner, orphan.died) == ("gateway-2", False)
    watched = False
    await runs._pass_on(run)
    assert orphan.died
    await beats.close()
    await answers.close()
    await table.close()
