"""A started job that comes to a prefill worker of another build."""

from types import SimpleNamespace
from typing import Any

import pytest

from schemas.beat import Beat
from schemas.errors import BegunElsewhere, BuildGone, Settle
from schemas.handoff import Handoff
from schemas.subjects import Stage, beat_subject
from schemas.wire import encode
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.prefill import home
from services.prefill.home import Home
from tests.worker.test_strays import handoff

MODEL = "m"
OTHER = "0ther0000000"
TEXT = "text"


class Run:
    """A job that `OTHER` began, as far as `Home` looks."""

    begun_by = OTHER
    history = SimpleNamespace(last=7)

    def __init__(self) -> None:
        self.published: list[tuple[Handoff, Stage]] = []

    def time_left(self) -> dict[str, float]:
        return {"timeout_left_s": 5.0, "ttft_left_s": 2.0}

    async def publish(self, handoff: Handoff, stage: Stage) -> None:
        self.published.append((handoff, stage))


async def send(bus: Bus, *texts: str) -> list[tuple[Handoff, Stage]]:
    """What is published when workers of `OTHER` with `texts` were heard."""
    table = BeatTable(bus)
    await table.start()
    try:
        for text in texts:
            said = Beat(process=f"p-{text}", role="prefill", state="stopped", model=MODEL, build=OTHER, text=text)
            await bus.publish(beat_subject(said.process), encode(said))
        await table.wait_for(lambda table: len(table.heard(MODEL, OTHER)) == len(texts))
        run: Any = Run()
        await Home(table, MODEL, TEXT).send(run, handoff("j", "mine00000000", hop=0))
        return run.published
    finally:
        await table.close()


async def test_it_goes_home_to_who_reads_it_alike(bus: Bus):
    """Also when that worker has left: another one may come, and who waits in that queue is looked after."""
    ((sent, stage),) = await send(bus, TEXT)
    assert (sent.build, sent.hop, sent.last, sent.timeout_left_s, sent.ttft_left_s, stage) == (
        OTHER,
        1,
        7,
        5.0,
        2.0,
        Stage.REWORK,
    )


@pytest.mark.parametrize("texts", [[], ["another-tokenizer"]])
async def test_a_draft_that_may_be_wrong_is_not_sent(bus: Bus, texts: list[str]):
    with pytest.raises(BegunElsewhere) as told:
        await send(bus, *texts)
    assert told.value.settle is Settle.REDELIVER


async def test_a_build_that_is_gone_ends_the_job(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(home, "BUILD_SILENT_AFTER_S", -1.0)
    with pytest.raises(BuildGone, match=OTHER):
        await send(bus, TEXT)
