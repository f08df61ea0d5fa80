"""A pipeline on a cluster of three NATS servers that loses its leader: gateway, workers, client and command go on."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from schemas.events import Event, Token
from schemas.subjects import REPLIES_STREAM
from services.bus.connection import Bus
from services.settings import Bus as BusSettings
from tests.bus.cluster import leader_of, running_cluster
from tests.chaos.load import MODEL, eight_jobs, essence, run_jobs
from tests.chaos.up import Up, running_up

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "Tell me a long story about a river."


async def asked_over_http(up: Up) -> str:
    """The text of a stream, which must end as it should."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 100, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    text = ""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{up.http}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        lines = [line.decode().removeprefix("data: ").strip() async for line in answer.content if line.strip()]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        if not line.startswith(":"):
            text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line)["choices"])
    return text


async def asked_by_command(up: Up) -> list[str]:
    """Tokens and ends, without what may differ from run to run."""
    printed = await up.kvrelay("generate", "--json", "--max-tokens", "100", "--ignore-eos", QUESTION)
    events = [json.loads(line) for line in printed if line.startswith("{")]
    assert [event["type"] for event in events if event["type"] in ("start", "done")] == ["start", "done"]
    return [json.dumps(event) for event in events if event["type"] in ("token", "finish")]


async def test_everybody_goes_on_when_the_leader_dies(tmp_path: Path):
    jobs = eight_jobs(max_tokens=64)
    with running_cluster(tmp_path / "nats") as cluster:
        async with (
            running_up(tmp_path / "up", "--nats", cluster.url, KVRELAY_BUS_REPLICAS="3") as up,
            await Bus.connect(cluster.url, "client", BusSettings(replicas=3)) as bus,
        ):
            expected = [essence(events) for events in await run_jobs(bus, jobs)]
            text, tokens = await asyncio.gather(asked_over_http(up), asked_by_command(up))
            for lost in ("leader", "leader again"):
                moment, left = asyncio.Event(), 60

                def count(event: Event, moment: asyncio.Event = moment) -> None:
                    nonlocal left
                    left -= isinstance(event, Token)
                    if left <= 0:
                        moment.set()

                async def lose(moment: asyncio.Event = moment) -> str:
                    await moment.wait()
                    name = await leader_of(bus, REPLIES_STREAM)
                    await asyncio.to_thread(cluster.kill, name)
                    return name

                salted = [{**job, "cache_salt": lost} for job in jobs]
                losing = asyncio.create_task(lose())
                streams, now_text, now_tokens = await asyncio.gather(
                    run_jobs(bus, salted, count), asked_over_http(up), asked_by_command(up)
                )
                assert [essence(events) for events in streams] == expected
                assert (now_text, now_tokens) == (text, tokens)
                await asyncio.to_thread(cluster.start, await losing)
    print("\ntwo leaders lost: 16 of 16 streams, 2 of 2 answers over HTTP and 2 of 2 of the command equal")
