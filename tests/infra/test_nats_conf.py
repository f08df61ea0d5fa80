"""What each user of infra/nats/nats.conf can do, by a real nats-server that runs on that very file."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import nats
import pytest

from schemas.errors import Forbidden, SetupError
from schemas.events import Finish, Token
from schemas.subjects import Lane, Stage, decode_subject, drain_subject, prefill_subject, reply_subject, rework_subject
from services.bus.connection import Bus
from services.bus.history import last_message, read_all
from services.bus.jetstream import call, publish_stored
from services.bus.publish import submit_job
from services.bus.streams import ensure_streams, stream_name
from services.client import Client, Place
from tests.gateway.scripted_worker import BUILD, ScriptedWorker
from tests.infra.sample_nats import SAMPLES, SampleNats

MODEL = "tiny"
Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleNats]:
    """With a job of acme and one of beta that are done, on the replies stream and on acme's copy of it."""
    server = SampleNats(tmp_path_factory.mktemp("sample"))
    try:
        asyncio.run(furnish(server.start()))
        yield server
    finally:
        server.stop()


async def furnish(server: SampleNats) -> None:
    async with (
        await Bus.connect(server.url, "operator", server.settings("operator")) as operator,
        await Bus.connect(server.url, "setup", server.settings("acme-setup")) as setup,
    ):
        await ensure_streams(operator, MODEL)
        config = json.loads((SAMPLES / "replies-of-acme.json").read_text(encoding="utf-8"))
        await call(setup, f"STREAM.CREATE.{config['name']}", config)
        for tenant in ("beta", "acme"):
            await publish_stored(operator, reply_subject(tenant, "done"), f'{{"of": "{tenant}"}}'.encode())
        async with asyncio.timeout(30):
            while (await call(setup, "STREAM.INFO.KVRELAY_REPLIES"))["state"]["messages"] < 1:
                await asyncio.sleep(0.02)


@pytest.fixture
async def connect(sample: SampleNats) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connected(user: str) -> Bus:
            return await stack.enter_async_context(await Bus.connect(sample.url, user, sample.settings(user)))

        yield connected


async def test_a_tenant_submits_and_streams_and_goes_on_after_a_cut(sample: SampleNats, connect: Connect) -> None:
    worker = ScriptedWorker(await connect("worker"), MODEL)
    await worker.start()
    password_file = sample.settings("acme").password_file
    async with await Client.connect(
        sample.url, model=MODEL, tenant="acme", user="acme", password_file=password_file
    ) as client:
        job = str((await client.submit(prompt="hi")).id)
        place, texts = Place(), []
        async for event in client.stream(job, place):
            if isinstance(event, Token):
                texts.append(event.text)
                break
        texts += [event.text async for event in client.stream(job, place) if isinstance(event, Token | Finish)]
        assert "".join(texts) == "Hello 世界 👋"
        assert (await client.state(job)).state == "done"
    await worker.close()


async def test_a_tenant_may_read_with_any_client(sample: SampleNats) -> None:
    """As the README shows for nats-py: an ordered consumer."""
    client = await nats.connect(sample.url, user="acme", password="acme-pw")
    js = client.jetstream()
    replies = await js.subscribe(
        reply_subject("acme", "done"), stream="KVRELAY_REPLIES", ordered_consumer=True, idle_heartbeat=1.0
    )
    assert (await replies.next_msg(timeout=10)).data == b'{"of": "acme"}'
    await client.close()


@pytest.mark.parametrize(
    "subject",
    [
        prefill_subject("beta", MODEL, Lane.INTERACTIVE),
        decode_subject(MODEL, BUILD, Lane.INTERACTIVE),
        rework_subject(MODEL, BUILD, Lane.INTERACTIVE),
        reply_subject("beta", "done"),
        reply_subject("acme", "done"),
        "kvrelay.cancel.beta.done",
        drain_subject("decode-1"),
        "kvrelay.dead.acme.done",
        "kvrelay.results.beta.b.1",
        "kvrelay.deliver.acme.x",
        "$JS.API.STREAM.DELETE.KVRELAY_REPLIES",
        "$JS.API.STREAM.CREATE.OTHER",
        "$JS.API.STREAM.UPDATE.KVRELAY_REPLIES",
        "KVRELAY.API.CONSUMER.CREATE.KVRELAY_REPLIES.x.kvrelay.replies.acme.x",
        "_INBOX.another.1",
    ],
)
async def test_a_tenant_publishes_its_own_jobs_and_nothing_else(connect: Connect, subject: str) -> None:
    with pytest.raises(Forbidden):
        await (await connect("acme")).request(subject, b"{}")


async def test_a_tenant_reads_its_own_replies_and_no_others_by_subject_or_sequence(connect: Connect) -> None:
    acme = await connect("acme")
    assert await last_message(acme, "beta", "done") is None
    assert await read_all(acme, "beta", "done") == []
    state = (await call(acme, "STREAM.INFO.KVRELAY_REPLIES", {"subjects_filter": ">"}))["state"]
    assert all(subject.startswith("kvrelay.replies.acme.") for subject in state["subjects"])
    assert state["subjects"]["kvrelay.replies.acme.done"] == 1
    for sequence in range(1, state["last_seq"] + 1):
        message = (await call(acme, "STREAM.MSG.GET.KVRELAY_REPLIES", {"seq": sequence}))["message"]
        assert message["subject"].startswith("kvrelay.replies.acme.")
    names = await call(acme, "STREAM.NAMES")
    assert names["streams"] == ["KVRELAY_REPLIES"]


async def test_a_tenant_hears_nothing_of_others(connect: Connect) -> None:
    acme, operator = await connect("acme"), await connect("operator")
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(str(message))

    for subject in ("kvrelay.>", ">", reply_subject("beta", "*"), "$JS.>"):
        await acme.subscribe(subject, hear)
    await publish_stored(operator, reply_subject("beta", "more"), b'{"secret": 1}')
    await operator.publish("kvrelay.cancel.beta.more")
    await acme.request("$JS.API.INFO")  # answered after what was sent before
    assert heard == []


@pytest.mark.parametrize(
    "reply",
    [
        decode_subject(MODEL, BUILD, Lane.INTERACTIVE),
        prefill_subject("beta", MODEL, Lane.INTERACTIVE),
        drain_subject("decode-1"),
        "kvrelay.cancel.beta.done",
    ],
)
async def test_the_server_sends_no_answer_where_the_tenant_may_not_send(connect: Connect, reply: str) -> None:
    """The broker answers on any subject that a request names. Inside one account that would forge messages."""
    assert await echoed(connect, "acme", prefill_subject("acme", MODEL, Lane.BATCH), reply) == []
    assert await echoed(connect, "gateway", prefill_subject("acme", MODEL, Lane.BATCH), reply) == [reply]


async def echoed(connect: Connect, user: str, subject: str, reply: str) -> list[str]:
    """Where the answer to a message that asks for one on `reply` came out in the pipeline's account."""
    sender, operator = await connect(user), await connect("operator")
    found: list[str] = []

    async def hear(message) -> None:
        found.append(message.subject)

    await operator.subscribe(reply, hear)
    await operator.request("$JS.API.INFO")  # now the subscription is there
    await sender.publish(subject, b"{}", reply=reply)
    await submit_job(sender, "acme", MODEL, Lane.BATCH, b"{}")  # stored, and so answered, after that one
    await operator.request("$JS.API.INFO")
    return found


async def test_no_consumer_of_a_tenant_delivers_where_it_may_not_send(connect: Connect) -> None:
    acme, operator = await connect("acme"), await connect("operator")
    drained: list[str] = []

    async def hear(message) -> None:
        drained.append(message.subject)

    await operator.subscribe("kvrelay.drain.*", hear)
    config = {"name": "c", "deliver_subject": drain_subject("decode-1"), "ack_policy": "none", "deliver_policy": "all"}
    body = {"stream_name": "KVRELAY_REPLIES", "action": "create", "config": config}
    before = await handed_off(operator)
    await call(acme, "CONSUMER.CREATE.KVRELAY_REPLIES.c", body)
    await submit_job(acme, "acme", MODEL, Lane.BATCH, b"{}")
    await operator.request("$JS.API.INFO")
    assert drained == []
    assert await handed_off(operator) == before


async def handed_off(operator: Bus) -> list[int]:
    """How many messages the queues have had that only workers may fill."""
    infos = [await call(operator, f"STREAM.INFO.{stream_name(stage, MODEL)}") for stage in (Stage.DECODE, Stage.REWORK)]
    return [info["state"]["last_seq"] for info in infos]


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("worker", prefill_subject("acme", MODEL, Lane.INTERACTIVE)),
        ("worker", drain_subject("decode-1")),
        ("gateway", decode_subject(MODEL, BUILD, Lane.INTERACTIVE)),
        ("gateway", rework_subject(MODEL, BUILD, Lane.INTERACTIVE)),
        ("gateway", drain_subject("decode-1")),
    ],
)
async def test_workers_make_no_jobs_and_gateways_no_hand_offs(connect: Connect, user: str, subject: str) -> None:
    with pytest.raises(Forbidden):
        await (await connect(user)).request(subject, b"{}")


async def test_nobody_gets_in_without_the_right_password(sample: SampleNats) -> None:
    wrong = sample.settings("worker")
    for settings in (type(wrong)(), type(wrong)(user="acme", password_file=wrong.password_file)):
        with pytest.raises(SetupError, match="no NATS server answers"):
            await Bus.connect(sample.url, "stranger", settings, timeout_s=0.5)
