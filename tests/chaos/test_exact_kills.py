"""The decode worker that holds a job is killed at a token, or paused past its claim: the stream is the undisturbed
one. Prints how exactly it was hit, and how long the reader waited."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from schemas.events import Event, Finish, Start, Token
from schemas.subjects import Lane, Stage, stream_name
from schemas.wire import encode
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.jetstream import call
from services.bus.publish import submit_job
from tests.bus.polling import until
from tests.chaos.load import MODEL, essence, run_jobs
from tests.chaos.up import Up, running_up
from tests.chaos.victims import Suspects, is_token, last_index, seen

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_TOKENS = 100
STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
SAMPLED: dict[str, Any] = {**STORY, "temperature": 1.0, "n": 2, "repetition_penalty": 1.1}
PARTY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Reply with only the emoji 🎉"}], "max_tokens": 15, "temperature": 0.0,
}  # fmt: skip
# Tokens of the emoji prompt are thirds of a character: after 1 and 4 a character has been begun.
KILLS = {
    "early": [(STORY, index) for index in (1, 2, 15, 16)],
    "late": [(STORY, index) for index in (17, 63, 64, 65)],
    "others": [(SAMPLED, 16), (PARTY, 1), (PARTY, 4)],
}
FEW_KILLS = [(STORY | {"max_tokens": 24}, 1), (SAMPLED | {"max_tokens": 24}, 16), (PARTY, 1)]


async def submit(bus: Bus, job: dict[str, Any], name: str) -> None:
    await submit_job(bus, "default", MODEL, Lane.INTERACTIVE, encode({**job, "id": name}))


async def killed_at(up: Up, bus: Bus, job: dict[str, Any], index: int, names: list[str]) -> list[Event]:
    """The job's stream, whose decode worker, one of `names`, dies when the first choice's token `index` is seen."""
    name = f"kill-{index}-{os.urandom(4).hex()}"
    suspects = Suspects(up, names)
    await submit(bus, job, name)
    events, victim, hit, gap_s, last_s = [], "", -1, 0.0, 0.0
    async for event, at_s in seen(bus, name):
        events.append(event)
        if isinstance(event, Token):
            gap_s = gap_s or (at_s - last_s if victim and event.index > hit else 0.0)
            last_s = at_s
        if not victim and is_token(event, index):
            victim = suspects.stop()
            os.kill(suspects.pids[victim], signal.SIGKILL)
            hit = await last_index(bus, name, heard=index)
    print(f"\n{victim} of {len(names)} killed at token {index} of {job['max_tokens']}, hit at {hit}, gap {gap_s:.2f} s")
    assert index <= hit <= index + 1, "a step at most had been published before the signal came"
    await up.replaced(victim, suspects.pids[victim])
    return events


class Reference:
    """Undisturbed streams, each made once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, list[Event]] = {}

    async def of(self, job: dict[str, Any], like: list[Event]) -> list[Event]:
        """One without a seed gets that which was derived from its id."""
        (start,) = [event for event in like if isinstance(event, Start)]
        seeded = {"seed": start.seed} | job
        greedy = job.get("temperature") == 0.0
        key = repr(job if greedy else seeded)
        if key not in self._known:
            (self._known[key],) = await run_jobs(self._bus, [seeded])
        return self._known[key]


async def kill_them(up: Up, bus: Bus, kills: list[tuple[dict[str, Any], int]], names: list[str]) -> None:
    reference, beats = Reference(bus), BeatTable(bus)
    await beats.start()
    for job, index in kills:
        # One that is still loading would look like the one that computes.
        pids = {up.pid(name) for name in names}
        assert await beats.wait_for(lambda table, pids=pids: pids <= working(table), 60.0)
        events = await killed_at(up, bus, job, index, names)
        expected = await reference.of(job, events)
        assert essence(events) == essence(expected)
        assert text(events) == text(expected) and "\ufffd" not in text(events)
        assert events[-1].usage.completion_tokens == expected[-1].usage.completion_tokens  # type: ignore[union-attr]
    await beats.close()


def working(table: BeatTable) -> set[int]:
    return {beat.pid for beat in table.alive("decode") if beat.state == "ok"}


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, (Token, Finish)) and event.choice == 0)


async def test_killed_at_a_token(tmp_path: Path) -> None:
    """CASES 17: another worker takes over, or the one that is started in place of the dead."""
    async with running_up(tmp_path, "--decode", "2") as up, await Bus.connect(up.nats, "client") as bus:
        await kill_them(up, bus, FEW_KILLS, ["decode-0", "decode-1"])


@pytest.mark.slow
@pytest.mark.parametrize("num_decode", [1, 2])
@pytest.mark.parametrize("when", KILLS)
async def test_killed_at_each_token(tmp_path: Path, num_decode: int, when: str) -> None:
    names = [f"decode-{number}" for number in range(num_decode)]
    async with running_up(tmp_path, "--decode", str(num_decode)) as up, await Bus.connect(up.nats, "client") as bus:
        await kill_them(up, bus, KILLS[when], names)


@pytest.mark.slow
@pytest.mark.parametrize("window_s", [120.0, 0.5])
async def test_paused_past_its_claim_and_woken_during_the_run_of_another(tmp_path: Path, window_s: float) -> None:
    """With a pause that is shorter and longer than the broker's duplicate window."""
    async with running_up(tmp_path, "--decode", "2") as up, await Bus.connect(up.nats, "client") as bus:
        stream = stream_name(Stage.DECODE, MODEL)
        config = (await call(bus, f"STREAM.INFO.{stream}"))["config"]
        await call(bus, f"STREAM.UPDATE.{stream}", config | {"duplicate_window": int(window_s * 1e9)})
        suspects = Suspects(up, ["decode-0", "decode-1"])
        await submit(bus, SAMPLED, "paused")
        events, sleeper = [], ""
        async for event, _ in seen(bus, "paused"):
            events.append(event)
            if is_token(event, 5) and not sleeper:
                sleeper = suspects.stop()
            if is_token(event, 20):
                os.kill(suspects.pids[sleeper], signal.SIGCONT)
        assert essence(events) == essence(await Reference(bus).of(SAMPLED, events))
        await until(lambda: is_settled(bus, stream))
        messages = await read_all(bus, "default", "paused")
        claims = [message.claim for message in messages if message.claim.startswith("decode")]
        assert claims == sorted(claims) and set(claims) == {"decode.1.1", "decode.1.2"}
        assert sum(message.ended for message in messages) == 1
        assert up.pid(sleeper) == suspects.pids[sleeper], "it goes on serving"


async def is_settled(bus: Bus, stream: str) -> bool:
    return bool((await call(bus, f"STREAM.INFO.{stream}"))["state"]["messages"] == 0)
