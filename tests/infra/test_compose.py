"""The compose file's topology, run as plain processes: it answers, guards its door, is scraped and tells no secrets."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import redis
import yaml

from schemas.subjects import Lane, prefill_subject
from services.bus.connection import Bus
from services.bus.dead_letters import dead_letters
from services.bus.jetstream import publish_stored
from tests.gateway.sse import parse
from tests.infra.compose import FILE, INFRA, KVRELAY, Topology, running, services
from tests.infra.tiny_folder import write_tiny_folder

SECRET = "Marmalade-Quince"  # of prompts; no log may have it
PROCESSES = {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "gateway"}


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    folder = tmp_path_factory.mktemp("compose")
    with running(folder, str(write_tiny_folder(folder / "tiny"))) as found:
        yield found


@pytest.mark.timeout(300)
async def test_the_topology_answers_and_its_logs_hold_nothing_of_what_was_asked(topology: Topology) -> None:
    url = topology.processes["gateway"].says(r'listening.*"url": ?"(http://[^"]+)"')
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        await all_ready(session, url)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": f"{SECRET} " * 10}], "max_tokens": 8}
        path, headers = f"{url}/v1/chat/completions", {"Authorization": f"Bearer {topology.key}"}
        for wrong in ({}, {"Authorization": f"Bearer {topology.key[:-1]}"}):
            async with session.post(path, json=chat, headers=wrong) as response:
                assert response.status == 401
        async with session.post(path, json={**chat, "stream": True}, headers=headers) as response:
            assert response.status == 200
            assert parse(await response.text())[-1].data == "[DONE]"
        for body in ({**chat, "stop": {SECRET: 1}}, {**chat, "model": SECRET}, {**chat, "max_tokens": SECRET}):
            async with session.post(path, json=body, headers=headers) as response:
                assert response.status in (400, 404)
        async with session.post(path, data=f'{{"{SECRET}'.encode(), headers=headers) as response:
            assert response.status == 400
        await cancel_one(session, url, chat, headers)
        await run_a_batch(session, url, chat, headers)
        await publish_garbage(topology)
        for name in PROCESSES:
            metrics = topology.processes[name].says(r'"url": ?"(http://[^"]+/metrics)"')
            async with session.get(metrics) as response:
                assert "kvrelay_" in await response.text()
    with redis.Redis(port=topology.ports["valkey"], password=topology.valkey_password) as client:
        assert client.dbsize() > 0
    for name in PROCESSES:
        topology.processes[name].terminate()
    codes = {name: topology.processes[name].wait() for name in PROCESSES}
    assert codes == dict.fromkeys(PROCESSES, 0)
    for name, process in topology.processes.items():
        assert SECRET.lower() not in process.log.lower(), name
    assert not re.search(r"permissions violation|does not let this user", everything(topology), re.IGNORECASE)


def everything(topology: Topology) -> str:
    return "\n".join(process.log for process in topology.processes.values())


async def all_ready(session: aiohttp.ClientSession, url: str) -> None:
    wanted = {"prefill": {"ok": 2}, "decode": {"ok": 3}}
    while True:
        async with session.get(f"{url}/ready") as response:
            found: dict[str, Any] = await response.json()
        if found["state"] == "ok" and {role: found["workers"].get(role) for role in wanted} == wanted:
            return
        await asyncio.sleep(0.1)


async def cancel_one(session: aiohttp.ClientSession, url: str, chat: dict[str, Any], headers: dict[str, str]) -> None:
    asked = {**chat, "max_tokens": 500}
    wishes = {**headers, "Prefer": "respond-async"}
    async with session.post(f"{url}/v1/chat/completions", json=asked, headers=wishes) as response:
        place = response.headers["Location"]
    async with session.delete(url + place, headers=headers) as response:
        assert (await response.json())["state"] in ("cancelled", "done")


async def run_a_batch(session: aiohttp.ClientSession, url: str, chat: dict[str, Any], headers: dict[str, str]) -> None:
    """From its file to the file's end: all that the gateway does on the broker."""
    line = {"custom_id": SECRET, "method": "POST", "url": "/v1/chat/completions", "body": chat}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="in.jsonl")
    async with session.post(f"{url}/v1/files", data=form, headers=headers) as response:
        file = (await response.json())["id"]
    order = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=order, headers=headers) as response:
        batch = await response.json()
    while batch["status"] != "completed":
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(0.1)
        async with session.get(f"{url}/v1/batches/{batch['id']}", headers=headers) as response:
            batch = await response.json()
    async with session.get(f"{url}/v1/files/{batch['output_file_id']}/content", headers=headers) as response:
        assert json.loads(await response.text())["custom_id"] == SECRET
    async with session.delete(f"{url}/v1/files/{file}", headers=headers) as response:
        assert response.status == 200


async def publish_garbage(topology: Topology) -> None:
    """A job that is none, which the workers complain of and put aside."""
    login = topology.nats_url.replace("//", f"//operator:{topology.operator_password}@")
    async with await Bus.connect(login, "operator") as operator:
        subject = prefill_subject("default", "tiny", Lane.INTERACTIVE)
        for payload in (f"{SECRET}{{", f'{{"v": 1, "id": "g", "prompt": "{SECRET}", "stop": "{SECRET}"}}'):
            await publish_stored(operator, subject, payload.encode())
        while not [letter async for letter in dead_letters(operator)]:
            await asyncio.sleep(0.1)


def test_the_example_names_each_password_that_the_file_asks_for() -> None:
    asked = set(re.findall(r"\$\{(\w+):\?", FILE.read_text(encoding="utf-8")))
    example = (INFRA / "compose" / "env.example").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)=$", example, re.MULTILINE)) == asked
    configured = re.findall(r"\$(\w+_PASSWORD)", (INFRA / "nats" / "accounts.conf").read_text(encoding="utf-8"))
    assert set(configured) | {"KVRELAY_VALKEY_PASSWORD"} == asked


def test_prometheus_scrapes_every_process() -> None:
    found = services(dict.fromkeys(re.findall(r"\$\{(\w+)", FILE.read_text(encoding="utf-8")), "x"))
    ours = {name: service for name, service in found.items() if service.image == KVRELAY and name != "model"}
    assert {name: service.replicas for name, service in ours.items()} == {"prefill": 2, "decode": 3, "gateway": 1}
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (discovery,) = jobs["kvrelay"]["dns_sd_configs"]
    assert set(discovery["names"]) == set(ours)
    assert {service.environment["KVRELAY_API_METRICS_PORT"] for service in ours.values()} == {str(discovery["port"])}
    assert {service.environment["KVRELAY_API_METRICS_HOST"] for service in ours.values()} == {"0.0.0.0"}
    exporters = {
        job["static_configs"][0]["targets"][0].partition(":")[0] for job in jobs.values() if "static_configs" in job
    }
    assert exporters - {"localhost"} <= set(found)
