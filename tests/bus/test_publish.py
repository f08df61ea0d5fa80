import asyncio

import msgspec
import pytest

from schemas.errors import ModelNotFound, Poisoned, QueueFull, TooLarge
from schemas.handoff import Handoff, parse_handoff
from schemas.job import Sampling
from schemas.subjects import MSG_ID_HEADER, Lane, Stage, dead_subject, prefill_subject, stream_name
from services.bus.burial import GivenUp, bury
from services.bus.connection import Bus, NoResponder
from services.bus.jetstream import call, publish_stored
from services.bus.publish import job_msg_id, publish_handoff, submit_job
from services.bus.queue import WorkQueue
from services.bus.server import NatsServer
from services.bus.streams import Source, ensure_streams
from tests.bus.conftest import BUILD, SETTINGS, MakeBus


def handoff(job: str, hop: int = 0) -> Handoff:
    return Handoff(
        tenant="default",
        job=job,
        origin="1-1",
        digest="d",
        build=BUILD,
        hop=hop,
        last=3,
        timeout_left_s=10.0,
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=4, seed=1),
        first=[],
        stored_blocks=1,
        cached_tokens=0,
    )


async def test_a_submitted_job_can_be_named_by_its_publisher(bus: Bus, model: str) -> None:
    submitted = await submit_job(bus, "acme", model, Lane.BATCH, b"{}")
    queue = WorkQueue(bus, [Source(Stage.PREFILL, Lane.BATCH, model, BUILD)])
    delivery = await queue.next()
    assert delivery.origin == await submitted.origin(bus)
    assert delivery.subject == prefill_subject("acme", model, Lane.BATCH)
    await queue.close()


async def test_a_job_with_an_id_is_queued_once(bus: Bus, model: str) -> None:
    headers = {MSG_ID_HEADER: job_msg_id("default", "one")}
    first = await submit_job(bus, "default", model, Lane.BATCH, b"{}", headers)
    again = await submit_job(bus, "default", model, Lane.BATCH, b"{}", headers)
    assert (again.duplicate, await again.origin(bus)) == (True, await first.origin(bus))


async def test_unknown_model_and_lane_are_refused_at_once(bus: Bus, model: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        await submit_job(bus, "default", "no-such-model", Lane.BATCH, b"{}")
    assert refused.value.param == "model"
    with pytest.raises(NoResponder):
        await publish_stored(bus, f"kvrelay.prefill.default.{model}.express", b"{}")


async def test_a_full_queue_refuses_with_429_and_recovers(server: NatsServer, make_bus: MakeBus) -> None:
    bus = await make_bus(server.url, msgspec.structs.replace(SETTINGS, queue_max_messages=2))
    await ensure_streams(bus, "full")
    for _ in range(2):
        await submit_job(bus, "default", "full", Lane.BATCH, b"{}")
    with pytest.raises(QueueFull) as refused:
        await submit_job(bus, "default", "full", Lane.BATCH, b"{}")
    assert refused.value.http_status == 429
    await call(bus, f"STREAM.PURGE.{stream_name(Stage.PREFILL, 'full')}")
    await submit_job(bus, "default", "full", Lane.BATCH, b"{}")


async def test_oversized_jobs_are_refused_and_their_neighbours_never_notice(bus: Bus, model: str) -> None:
    headers = {MSG_ID_HEADER: "default.big"}

    async def small(number: int) -> int:
        return (await submit_job(bus, "default", model, Lane.INTERACTIVE, b'{"n":%d}' % number)).sequence

    async def big() -> None:
        for size in (bus.max_payload, bus.max_payload + 1, 5 * bus.max_payload):
            with pytest.raises(TooLarge, match=str(bus.max_payload)) as refused:
                await submit_job(bus, "default", model, Lane.INTERACTIVE, b"x" * size, headers)
            assert refused.value.http_status == 413

    sequences, _ = await asyncio.gather(asyncio.gather(*map(small, range(20))), big())
    assert len(set(sequences)) == 20
    assert bus.num_reconnects == 0


async def test_a_payload_of_exactly_the_limit_is_stored(bus: Bus, model: str) -> None:
    await submit_job(bus, "default", model, Lane.BATCH, b"x" * bus.max_payload)
    assert bus.num_reconnects == 0


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.REWORK])
async def test_a_handoff_reaches_the_workers_of_its_build_once(bus: Bus, model: str, stage: Stage) -> None:
    first = await publish_handoff(bus, handoff("h"), model, Lane.BATCH, stage)
    assert await publish_handoff(bus, handoff("h"), model, Lane.BATCH, stage) == first
    assert await publish_handoff(bus, handoff("h", hop=1), model, Lane.BATCH, stage) != first
    queue = WorkQueue(bus, [Source(stage, Lane.BATCH, model, BUILD)])
    delivery = await queue.next()
    assert parse_handoff(delivery.data) == handoff("h")
    await queue.close()


async def test_a_handoff_is_tried_again_while_the_claim_is_held(bus: Bus, model: str) -> None:
    name = stream_name(Stage.DECODE, model)
    config = (await call(bus, f"STREAM.INFO.{name}"))["config"]
    await call(bus, f"STREAM.UPDATE.{name}", config | {"max_msgs": 1})
    await publish_handoff(bus, handoff("a"), model, Lane.BATCH)
    with pytest.raises(QueueFull):
        await publish_handoff(bus, handoff("b"), model, Lane.BATCH)

    refused = asyncio.Event()

    def held() -> bool:
        refused.set()
        return True

    waiting = asyncio.create_task(publish_handoff(bus, handoff("b"), model, Lane.BATCH, held=held))
    await refused.wait()
    await call(bus, f"STREAM.UPDATE.{name}", config)
    assert await waiting == 2


async def test_a_dead_letter_keeps_the_payload_and_the_reason(bus: Bus) -> None:
    await ensure_streams(bus, "dead")
    for _ in range(2):
        given_up = GivenUp(b"not json", "kvrelay.prefill.acme.m.batch", "5-6", 4)
        await bury(bus, "acme", "j1", given_up, Poisoned("three\r\ntimes"))
    message = await bus.request(f"$JS.API.DIRECT.GET.KVRELAY_DEAD.{dead_subject('acme', 'j1')}")
    assert message.data == b"not json"
    assert message.headers is not None
    assert message.headers["Kvrelay-Code"] == "poisoned"
    assert message.headers["Kvrelay-Reason"] == "three times"
    assert message.headers["Kvrelay-Deliveries"] == "4"
    assert (await call(bus, "STREAM.INFO.KVRELAY_DEAD"))["state"]["messages"] == 1
