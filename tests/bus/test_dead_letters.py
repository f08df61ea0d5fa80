"""Dead letters on a real broker: listed without their payloads, published again without loss, removed."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from schemas.errors import (
    IdConflict,
    InvalidRequest,
    JobNotFound,
    KvrelayError,
    ModelNotFound,
    Poisoned,
    QueueFull,
    Settle,
)
from schemas.events import Event
from schemas.handoff import Handoff
from schemas.job import Job, Sampling, job_digest, parse_job
from schemas.subjects import DEAD_STREAM, Lane, Stage, prefill_subject, stream_name
from schemas.wire import encode
from services.bus import dead_letters as dead_letters_module
from services.bus import dead_retry
from services.bus.burial import GivenUp, bury
from services.bus.chain import fail_job
from services.bus.connection import Bus
from services.bus.dead_letters import DeadLetter, dead_letters, payload_of, remove
from services.bus.dead_retry import retry
from services.bus.jetstream import call
from services.bus.queue import WorkQueue
from services.bus.replies import ReplyWriter
from services.bus.streams import Source
from tests.bus.conftest import BUILD
from tests.bus.events import START, ending
from tests.bus.test_publish import handoff

JOB = {"prompt": "Once", "max_tokens": 3, "owner": "gateway-1", "on_disconnect": "cancel", "metadata": {"a": "ü"}}


class Dead:
    """Buries messages of one model."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.bus = bus
        self.model = model
        self._numbers = iter(range(1, 1000))

    async def bury(
        self, job: str, payload: bytes, *, subject: str = "", error: KvrelayError | None = None, tenant: str = "default"
    ) -> DeadLetter:
        subject = subject or prefill_subject(tenant, self.model, Lane.BATCH)
        given_up = GivenUp(payload, subject, f"{next(self._numbers)}-1", 4)
        await bury(self.bus, tenant, job, given_up, error or Poisoned("three times"))
        return (await listed(self.bus, tenant, job))[-1]

    async def queued(self) -> list[tuple[str, Job]]:
        """(Subject, job) of what is on the model's queue, taken from it."""
        found = []
        queue = WorkQueue(self.bus, [Source(Stage.PREFILL, lane, self.model, BUILD) for lane in Lane])
        while await self.num_queued():
            delivery = await queue.next()
            found.append((delivery.subject, parse_job(delivery.data)))
            await delivery.settle(Settle.ACK)
        await queue.close()
        return found

    async def num_queued(self) -> int:
        return int((await call(self.bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, self.model)}"))["state"]["messages"])

    async def begin(self, job: Job, *events: Event) -> None:
        """As a worker does that takes the job."""
        assert job.id is not None
        writer = ReplyWriter(self.bus, "default", job.id, 0, "prefill.0.1")
        writer.put(msgspec.structs.replace(START, job=job.id, digest=job_digest(job)), *events)
        await writer.drained()


@pytest.fixture
async def dead(bus: Bus, model: str) -> AsyncIterator[Dead]:
    yield Dead(bus, model)
    await call(bus, f"STREAM.PURGE.{DEAD_STREAM}")


async def listed(bus: Bus, tenant: str = "*", job: str = "*") -> list[DeadLetter]:
    return [letter async for letter in dead_letters(bus, tenant, job)]


async def test_what_is_told_of_a_letter(dead: Dead) -> None:
    payload = b"\x00not json"
    letter = await dead.bury("j1", payload, error=IdConflict("the id ü is\r\ntaken"), tenant="acme")
    assert (letter.tenant, letter.job, letter.code, letter.reason) == ("acme", "j1", "id_conflict", "the id ü is taken")
    assert (letter.num_delivered, letter.payload_bytes, letter.is_truncated) == (4, len(payload), False)
    assert letter.subject == prefill_subject("acme", dead.model, Lane.BATCH)
    assert abs(letter.died_at - dead.bus.now()) < 10
    assert await payload_of(dead.bus, letter) == payload
    assert await remove(dead.bus, letter)
    assert not await remove(dead.bus, letter)
    assert await payload_of(dead.bus, letter) is None
    assert await listed(dead.bus) == []


async def test_many_letters_come_in_order_and_by_name(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters_module, "_BATCH_MESSAGES", 4)
    for number in range(10):
        await dead.bury(f"j{number % 5}", b"x" * number, tenant=f"t{number % 2}")
    letters = await listed(dead.bus)
    assert [letter.stored_bytes for letter in letters] == list(range(10))
    assert [letter.sequence for letter in letters] == sorted(letter.sequence for letter in letters)
    assert {letter.job for letter in await listed(dead.bus, "t1")} == {f"j{n}" for n in range(5)}
    assert [letter.stored_bytes for letter in await listed(dead.bus, job="j3")] == [3, 8]
    assert [letter.stored_bytes for letter in await listed(dead.bus, "t0", "j3")] == [8]


async def test_letters_that_vanish_while_they_are_listed(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters_module, "_BATCH_MESSAGES", 2)
    for number in range(6):
        await dead.bury(f"j{number}", b"x")
    seen = []
    async for letter in dead_letters(dead.bus):
        seen.append(letter.job)
        await call(dead.bus, f"STREAM.PURGE.{DEAD_STREAM}")
    assert seen == ["j0", "j1"], "what had arrived already"
    assert (await call(dead.bus, f"STREAM.INFO.{DEAD_STREAM}"))["state"]["consumer_count"] == 0


async def test_a_job_is_published_as_it_was_under_a_new_id(dead: Dead, job: str) -> None:
    letter = await dead.bury(job, encode({**JOB, "id": job}), tenant="acme")
    assert await retry(dead.bus, letter) == f"{job}-r1"
    ((subject, published),) = await dead.queued()
    assert subject == letter.subject
    expected = {**JOB, "id": f"{job}-r1", "owner": None, "on_disconnect": "continue"}
    assert published == parse_job(encode(expected)), "but for who watches it: whoever did has been told of its end"
    assert await listed(dead.bus) == []


async def test_a_job_without_an_id_gets_one(dead: Dead, job: str) -> None:
    letter = await dead.bury(job, encode({"prompt": "x"}))
    assert await retry(dead.bus, letter) == f"{job}-r1"


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.REWORK])
async def test_a_handoff_becomes_the_job_that_it_came_from(dead: Dead, job: str, stage: Stage) -> None:
    given: Handoff = msgspec.structs.replace(handoff(job, hop=2), salt="s", owner="gateway-1", tenant="acme")
    subject = f"kvrelay.{stage}.{dead.model}.{BUILD}.interactive"
    letter = await dead.bury(job, encode(given), subject=subject, tenant="acme")
    assert await retry(dead.bus, letter) == f"{job}-r1"
    ((subject, published),) = await dead.queued()
    assert subject == prefill_subject("acme", dead.model, Lane.INTERACTIVE)
    assert (published.prompt_token_ids, published.cache_salt, published.owner) == ([1, 2, 3], "s", None)
    assert {name: getattr(published, name) for name in Sampling.__struct_fields__} == msgspec.structs.asdict(
        given.sampling
    )


@pytest.mark.parametrize(
    ("payload", "subject", "words"),
    [
        (b"\x00\xff", "", "not UTF-8"),
        (b"{", "", "not valid JSON"),
        (b'{"v": 2, "prompt": "x"}', "", "the message has v=2"),
        (b'{"prompt": ""}', "", "prompt is empty"),
        (b'{"tenant": "default"}', "kvrelay.decode.m.0123456789ab.batch", "missing required field"),
        (encode(JOB), "kvrelay.results.a.b.c", "no subject of a work queue"),
        (encode(JOB), "kvrelay.prefill.a b.m.batch", "tenant must match"),
    ],
)
async def test_what_is_no_job_stays(dead: Dead, job: str, payload: bytes, subject: str, words: str) -> None:
    letter = await dead.bury(job, payload, subject=subject)
    with pytest.raises(InvalidRequest, match=words):
        await retry(dead.bus, letter)
    assert await listed(dead.bus) == [letter]


async def test_a_payload_that_was_cut_short_stays(dead: Dead, job: str) -> None:
    payload = encode({"prompt": "x" * dead.bus.max_payload})
    letter = await dead.bury(job, payload)
    assert letter.is_truncated and letter.payload_bytes == len(payload)
    with pytest.raises(InvalidRequest, match=f"of its {len(payload)} bytes"):
        await retry(dead.bus, letter)
    assert await listed(dead.bus) == [letter]


async def test_a_letter_stays_where_its_queue_takes_nothing(dead: Dead, job: str) -> None:
    gone = await dead.bury(job, encode(JOB), subject=prefill_subject("default", "no-such-model", Lane.BATCH))
    with pytest.raises(ModelNotFound):
        await retry(dead.bus, gone)
    name = stream_name(Stage.PREFILL, dead.model)
    config = (await call(dead.bus, f"STREAM.INFO.{name}"))["config"]
    full = await dead.bury(job, encode(JOB))
    await retry(dead.bus, await dead.bury(job, encode(JOB)), {f"{job}-r1"})
    await call(dead.bus, f"STREAM.UPDATE.{name}", config | {"max_msgs": 1})
    with pytest.raises(QueueFull):
        await retry(dead.bus, full)
    assert await listed(dead.bus) == [gone, full]


# Killed between publishing and removing: the letter is there, and so is the job, queued, running or done.


async def retry_killed_before_removing(dead: Dead, letter: DeadLetter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def killed(*_: object) -> bool:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(dead_retry, "remove", killed)
        with pytest.raises(asyncio.CancelledError):
            await retry(dead.bus, letter)
    assert await listed(dead.bus) == [letter]


@pytest.mark.parametrize("then", ["queued", "running", "done"])
async def test_the_second_try_doubles_nothing(dead: Dead, job: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    letter = await dead.bury(job, encode(JOB))
    await retry_killed_before_removing(dead, letter, monkeypatch)
    published: list[tuple[str, Job]] = []
    if then != "queued":
        published = await dead.queued()
        await dead.begin(published[0][1], *(ending(0) if then == "done" else []))
    assert await retry(dead.bus, letter) == f"{job}-r1"
    published += await dead.queued()
    assert [found.id for _, found in published] == [f"{job}-r1"]
    assert await listed(dead.bus) == []


async def test_a_second_try_after_the_duplicate_window_is_a_repeat(
    dead: Dead, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is queued twice, under one id and as one job: the worker settles the second unseen (`is_repeat`)."""
    letter = await dead.bury(job, encode(JOB))
    await retry_killed_before_removing(dead, letter, monkeypatch)
    published = await dead.queued()
    monkeypatch.setattr(dead_retry, "MSG_ID_HEADER", "X-Forgotten")
    assert await retry(dead.bus, letter) == f"{job}-r1"
    assert await dead.queued() == published


async def test_a_retry_that_failed_as_well_is_followed_by_another(
    dead: Dead, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = await dead.bury(job, encode(JOB))
    await retry_killed_before_removing(dead, letter, monkeypatch)
    ((_, first),) = await dead.queued()
    await dead.begin(first)
    await fail_job(dead.bus, "default", f"{job}-r1", Poisoned("again"))
    assert await retry(dead.bus, letter) == f"{job}-r2"
    again = await dead.bury(f"{job}-r2", encode({**JOB, "id": f"{job}-r2"}))
    assert await retry(dead.bus, again) == f"{job}-r3"


async def test_an_id_of_another_job_is_left_to_it(dead: Dead, job: str) -> None:
    await dead.begin(Job(id=f"{job}-r1", prompt="another"))
    assert await retry(dead.bus, await dead.bury(job, encode(JOB))) == f"{job}-r2"


async def test_two_jobs_that_shared_an_id_get_two(dead: Dead, job: str) -> None:
    """Also while the first one is queued, so that nothing is known of its new id yet."""
    first = await dead.bury(job, encode(JOB))
    second = await dead.bury(job, encode({"prompt": "another"}), error=IdConflict("taken"))
    assert await retry(dead.bus, first) == f"{job}-r1"
    assert await retry(dead.bus, second) == f"{job}-r2"
    assert [found.prompt for _, found in await dead.queued()] == ["Once", "another"]


async def test_a_letter_that_somebody_dropped_meanwhile(dead: Dead, job: str) -> None:
    letter = await dead.bury(job, encode(JOB))
    await remove(dead.bus, letter)
    with pytest.raises(JobNotFound):
        await retry(dead.bus, letter)
    assert await dead.num_queued() == 0
