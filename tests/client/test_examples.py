"""The examples as people would run them, on a real pipeline; each needs its toolchain."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.bus.connection import Bus
from tests.chaos.up import Up, running_up

EXAMPLES = Path(__file__).parents[2] / "infra" / "examples"
ANSWER = "The capital of France is Paris."


async def output(*command: str, **env: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **env})
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    async with running_up(tmp_path) as running:
        yield running


async def over_websocket(nats: str, root: str) -> str:
    """The answer as a page gets it that leaves after two tokens and comes back."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / "websocket.py"),
        nats,
        "0",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert server.stdout is not None
    url = json.loads(await server.stdout.readline())["url"]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
    text, job, last = "", "", -1
    try:
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(url) as socket:
                await socket.send_json(asked)
                while last < 1:
                    event = await socket.receive_json()
                    job = event.get("job", job)
                    text, last = text + event.get("text", ""), event.get("index", last)
            async with session.ws_connect(url) as socket:
                await socket.send_json({"resume": job, "after": last})
                events = [json.loads(message.data) async for message in socket]
    finally:
        server.terminate()
        await server.communicate()
    assert events[-1]["type"] == "done"
    return text + "".join(event.get("text", "") for event in events)


async def as_micro_services(nats: str) -> None:
    """`nats micro ping`, and `nats micro stats` of what the examples before this have asked for."""
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with await Bus.connect(nats) as bus:
        reply = bus.expect(lambda message: told.put_nowait(json.loads(message.data)) if message is not None else None)
        await bus.publish("$SRV.PING", reply=reply)
        found = {one["name"]: one["id"] for one in [await told.get() for _ in range(3)]}
        assert found.keys() == {"kvrelay-prefill", "kvrelay-decode", "kvrelay-gateway"}
        for role in ("prefill", "decode"):
            stats = json.loads((await bus.request(f"$SRV.STATS.kvrelay-{role}")).data)
            (endpoint,) = stats["endpoints"]
            assert (stats["id"], endpoint["name"]) == (found[f"kvrelay-{role}"], role)
            assert endpoint["num_requests"] >= 2 and endpoint["num_errors"] == 0


async def as_the_readme_says(url: str) -> None:
    """What it asks with curl: a stream, an answer held to a schema, and the stats."""
    readme = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^curl (?:\\\n|[^'\n]|'[^']*')*", blocks, re.MULTILINE)
    stream, held, stats = [
        await output("sh", "-c", command.replace("curl ", "curl -sSf ").replace("http://127.0.0.1:8080", url))
        for command in commands
    ]
    *chunks, last = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]" and json.loads(chunks[-1])["choices"][0]["finish_reason"] in ("stop", "length")
    person = json.loads(json.loads(held)["choices"][0]["message"]["content"])
    assert list(person) == ["name", "age", "pet"] and person["pet"] in ("cat", "dog") and type(person["age"]) is int
    assert json.loads(stats)["workers"]


@pytest.mark.timeout(240)
async def test_the_examples(up: Up, tmp_path: Path) -> None:
    """One pipeline for all of them: starting it is what takes time."""
    root = str(EXAMPLES.parents[1])
    assert ANSWER in await output(sys.executable, str(EXAMPLES / "client.py"), up.nats, PYTHONPATH=root)
    assert await over_websocket(up.nats, root) == ANSWER
    await as_micro_services(up.nats)
    if shutil.which("curl"):
        answer = json.loads(await output("sh", str(EXAMPLES / "poll.sh"), up.http))
        assert answer["choices"][0]["message"]["content"] == ANSWER
        await as_the_readme_says(up.http)
    if go := shutil.which("go"):
        cache = {"GOCACHE": str(tmp_path / "go"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
        assert await output(go, "run", str(EXAMPLES / "stream.go"), up.http, **cache) == ANSWER + "\n"
