"""The client for NATS against a real broker and a scripted worker."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from schemas.errors import Cancelled, IdConflict, InvalidRequest, ModelNotFound, Poisoned
from schemas.events import Done, Error, Token
from schemas.state import JobState
from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.client import Client, Place
from tests.bus.throwaway import throwaway_server
from tests.gateway.conftest import BUS
from tests.gateway.scripted_worker import ScriptedWorker, Work, ending, saying, token

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("client"), settings=BUS) as running:
        yield running


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[ScriptedWorker]:
    async with await Bus.connect(server.url, "worker", BUS) as bus:
        made = ScriptedWorker(bus, f"tiny-{next(_numbers)}")
        await made.start()
        yield made
        await made.close()


@pytest.fixture
async def client(server: NatsServer, worker: ScriptedWorker) -> AsyncIterator[Client]:
    async with await Client.connect(server.url, model=worker._model) as made:
        yield made


async def test_text(client: Client, worker: ScriptedWorker) -> None:
    assert await client.text((await client.submit(prompt_token_ids=[5, 6])).id or "") == "Hello 世界 👋"
    assert (await worker.taken.get()).job.prompt_token_ids == [5, 6]


async def test_the_same_job_twice_runs_once(client: Client, worker: ScriptedWorker) -> None:
    jobs = [await client.submit(id="twice", prompt="a", temperature=0.0) for _ in range(2)]
    assert [await client.text(job.id or "") for job in jobs] == ["Hello 世界 👋"] * 2
    assert worker.taken.qsize() == 1


async def test_resume_in_another_client(client: Client, worker: ScriptedWorker, server: NatsServer) -> None:
    go_on = asyncio.Event()

    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "a"), token(1, "b"))
        await go_on.wait()
        await work.say(token(2, "c"), *ending(work.job, 3, "d"))

    worker.script = script
    job = await client.submit(prompt="x")
    place, seen = Place(), ""
    async for event in client.stream(job.id or "", after=place):
        if isinstance(event, Token):
            seen += event.text
            if event.index == 0:
                break
    kept = msgspec.json.encode(place)
    go_on.set()
    async with await Client.connect(server.url, model=worker._model) as other:
        rest = [e async for e in other.stream(job.id or "", after=msgspec.json.decode(kept, type=Place))]
    assert seen + "".join(e.text for e in rest if isinstance(e, Token)) == "abc"
    assert isinstance(rest[-1], Done)


async def test_cancel(client: Client, worker: ScriptedWorker) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start())
        await work.lost.wait()

    worker.script = script
    job = await client.submit(prompt="x")
    await worker.taken.get()
    assert await client.cancel(job) and not await client.cancel(job)
    assert await worker.cancelled.get() == job.id
    with pytest.raises(Cancelled):
        await client.text(job.id or "")
    assert (await client.state(job)).state is JobState.CANCELLED


async def test_errors(client: Client, worker: ScriptedWorker, server: NatsServer) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), Error(code="poisoned", message="no"))

    worker.script = script
    with pytest.raises(Poisoned):
        await client.text((await client.submit(prompt="x")).id or "")
    worker.script = saying("x")
    with pytest.raises(IdConflict):  # the scripted worker writes another digest
        await client.text(await client.submit(prompt="x"))
    for fields in (
        {},
        {"prompt": "x", "messages": []},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "no": 1},
    ):
        with pytest.raises(InvalidRequest):
            await client.submit(**fields)
    async with await Client.connect(server.url, model="nobody") as stranger:
        with pytest.raises(ModelNotFound):
            await stranger.submit(prompt="x")


def test_it_is_light() -> None:
    code = "import services.client, sys; print([n for n in ('torch', 'tokenizers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "[]\n"
