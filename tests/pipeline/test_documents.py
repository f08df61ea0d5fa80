"""What really goes over the bus is what infra/schemas says, to the last message."""

import asyncio
import json
from collections import Counter

import aiohttp
from nats.aio.msg import Msg

from schemas.beat import Beat
from schemas.drain import DrainReply
from schemas.errors import Cancelled
from schemas.events import Error
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.drain import DrainListener, ask_to_drain
from services.bus.micro import Tally, endpoints_of
from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline
from tests.pipeline.tiny import SLUG
from tests.schemas import bus_documents

MESSAGES = [{"role": "user", "content": "hi"}]
CHANNELS = {
    "jobs",
    "replies",
    "decode",
    "beats",
    "cancels",
    "drains",
    "files",
    "file_parts",
    "batches",
    "results",
    "dead",
}


async def test_every_message_is_as_documented(tiny_pipelines: Pipelines) -> None:
    seen: list[Msg] = []
    async with tiny_pipelines() as pipeline, await Bus.connect(pipeline.url, "listener") as ear:

        async def note(message: Msg) -> None:
            seen.append(message)

        await ear.subscribe("kvrelay.>", note)
        await ear.request("$JS.API.INFO")  # the subscription is there
        workers = (pipeline.prefill_worker, pipeline.decode_worker)
        for worker in workers:
            await worker.publisher.beat()
        await over_nats(pipeline)
        await over_http(pipeline)
        await ear.request("$JS.API.INFO")  # and what was published has come
        tallies = [counts(worker.process.beat(), worker.process.tally) for worker in workers]
    found = Counter(bus_documents.check(message.subject, message.data) for message in seen)
    assert set(found) >= CHANNELS
    (prefilled, failed), (decoded, _) = tallies  # a delivery that comes again counts again
    assert prefilled >= 4 and failed >= 2 and decoded >= 2


def counts(beat: Beat, tally: Tally) -> tuple[int, int]:
    """Jobs that ended, and those that failed, as `nats micro stats` tells them."""
    (endpoint,) = endpoints_of(beat)
    stats = tally.of(endpoint, beat)
    assert stats.processing_time > 0
    return stats.num_requests, stats.num_errors


async def over_nats(pipeline: LocalPipeline) -> None:
    await pipeline.ask(messages=MESSAGES, n=2, logprobs=2, max_tokens=5, seed=3, stop=["zz"], metadata={"a": 1})
    assert isinstance((await pipeline.ask(prompt_token_ids=[9] * 2000)).end, Error)
    assert isinstance((await pipeline.ask(prompt="hi", v=2)).end, Error)
    name = await pipeline.submit(prompt="hi", ignore_eos=True)
    await cancel_job(pipeline.bus, "default", name, Cancelled("enough"))
    await pipeline.read(name)
    listener = DrainListener(
        pipeline.bus, "some-worker", lambda: DrainReply(process="some-worker", grace_s=1.0, running=0)
    )
    await listener.start()
    await ask_to_drain(pipeline.bus, "some-worker")
    await listener.close()


async def over_http(pipeline: LocalPipeline) -> None:
    gateway = Gateway(Settings(api=Api(port=0)), pipeline.bus, "gateway-documents", {SLUG: pipeline.text})
    await gateway.start()
    await gateway.readiness.check(SLUG, 10.0)
    try:
        async with aiohttp.ClientSession(gateway.url) as session:
            body = {"model": SLUG, "messages": MESSAGES, "max_tokens": 4, "stream": True}
            async with session.post("/v1/chat/completions", json=body) as response:
                assert "[DONE]" in await response.text()
            await batch(session)
    finally:
        await gateway.close()


async def batch(session: aiohttp.ClientSession) -> None:
    """One line that runs, and one that is refused."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": SLUG, "prompt": prompt}}
        for name, prompt in (("a", "hi"), ("b", ""))
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="in.jsonl")
    async with session.post("/v1/files", data=form) as response:
        file = (await response.json())["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with session.post("/v1/batches", json=asked) as response:
        made = await response.json()
    async with asyncio.timeout(60):
        while made["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            async with session.get(f"/v1/batches/{made['id']}") as response:
                made = await response.json()
    assert made["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
