"""API keys: who is let in, whose request it is, and that nobody reaches what is another tenant's."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from schemas.errors import InvalidRequest, JobNotFound, SetupError
from services.gateway import key_file
from services.gateway.exposure import refuse_open_door
from services.gateway.key_file import id_of
from services.gateway.keys import Keys
from services.settings import Api
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import saying

TENANTS = ("acme", "beta")


class Door:
    """A pipeline behind keys, with one key for each tenant."""

    def __init__(self, pipeline: Pipeline, file: Path, keys: dict[str, str]) -> None:
        self.pipeline = pipeline
        self.file = file
        self.keys = keys

    def ask(self, tenant: str, method: str, path: str, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} | more.pop("headers", {})
        return self.pipeline.session.request(method, self.pipeline.url + path, headers=headers, **more)

    def chat(self, tenant: str, **more: Any) -> Any:
        return self.ask(tenant, "POST", "/v1/chat/completions", json=self.pipeline.chat(**more.pop("body", {})), **more)


@pytest.fixture
async def door(make_pipeline: MakePipeline, tmp_path: Path) -> AsyncIterator[Door]:
    file = tmp_path / "keys.json"
    keys = {tenant: key_file.add(file, tenant) for tenant in TENANTS}
    yield Door(await make_pipeline(keys_file=str(file), resume_grace_s=5.0), file, keys)


async def refused(response: aiohttp.ClientResponse, status: int, code: str) -> None:
    assert response.status == status
    error = (await response.json())["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic KEY",
        "KEY",
        "Bearer KEYx",
        "Bearer kvr-00000000-" + "a" * 43,
        "Bearer kvr-é",
        "Bearer " + "k" * 7000,
    ],
)
async def test_without_a_right_key_nothing_is_answered(door: Door, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.replace("KEY", door.keys["acme"])}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/requests/x"),
        ("GET", "/no"),
    ):
        async with door.pipeline.session.request(method, door.pipeline.url + path, headers=headers) as response:
            await refused(response, 401, "unauthorized")
            assert response.headers["WWW-Authenticate"] == "Bearer"
    assert door.pipeline.worker.taken.empty()


async def test_the_official_client_sends_its_key(door: Door) -> None:
    def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{door.pipeline.url}/v1", api_key=key, max_retries=0)

    body: Any = door.pipeline.chat()
    async with client(door.keys["acme"]) as right, client("sk-another") as wrong:
        assert (await right.chat.completions.create(**body)).choices[0].message.content == "Hello 世界 👋"
        with pytest.raises(openai.AuthenticationError) as refused_with:
            await wrong.chat.completions.create(**body)
    assert refused_with.value.code == "unauthorized"


async def test_probes_need_no_key(door: Door) -> None:
    for path in ("/health", "/ready"):
        async with door.pipeline.session.get(door.pipeline.url + path) as response:
            assert response.status == 200


async def test_a_key_names_its_tenant_whatever_the_body_says(door: Door) -> None:
    async with door.chat("beta", body={"user": "acme", "metadata": {"tenant": "acme"}}) as response:
        assert response.status == 200
    work = await door.pipeline.worker.taken.get()
    assert work.delivery.subject == f"kvrelay.prefill.beta.{door.pipeline.model}.interactive"


async def test_keys_are_added_and_revoked_while_it_runs(door: Door) -> None:
    door.keys["new"] = key_file.add(door.file, "acme", "a second one")
    async with door.ask("new", "GET", "/v1/models") as response:
        assert response.status == 200
    key_file.revoke(door.file, id_of(door.keys["new"]) or "")
    async with door.ask("new", "GET", "/v1/models") as response:
        await refused(response, 401, "unauthorized")
        assert "revoked" in (await response.json())["error"]["message"]
    async with door.ask("acme", "GET", "/v1/models") as response:
        assert response.status == 200


async def test_a_file_that_breaks_locks_nobody_out(door: Door) -> None:
    text = door.file.read_text(encoding="utf-8")
    door.file.write_text(text[:-20], encoding="utf-8")
    async with door.ask("acme", "GET", "/v1/models") as response:
        assert response.status == 200
    door.file.unlink()
    async with door.ask("acme", "GET", "/v1/models") as response:
        assert response.status == 200
    door.file.write_text('{"keys": []}', encoding="utf-8")
    async with door.ask("acme", "GET", "/v1/models") as response:
        await refused(response, 401, "unauthorized")


async def test_another_tenants_requests_are_not_there(door: Door) -> None:
    async with door.chat("acme", headers={"X-Request-Id": "mine"}) as response:
        name = (await response.json())["id"]
    job = name.replace("chatcmpl-", "req-")
    for each in (name, job, "mine"):
        for path in (f"/v1/requests/{each}", f"/v1/requests/{each}/answer", f"/v1/requests/{each}/events"):
            async with door.ask("beta", "GET", path) as response:
                await refused(response, 404, "not_found")
            async with door.ask("acme", "GET", path) as response:
                assert response.status == 200, path
        async with door.ask("beta", "DELETE", f"/v1/requests/{each}") as response:
            await refused(response, 404, "not_found")


async def test_another_tenant_can_stop_nothing(door: Door) -> None:
    going = asyncio.Event()

    async def held(work: Any) -> None:
        await going.wait()
        await saying("done")(work)

    door.pipeline.worker.script = held
    async with door.chat("acme", headers={"Prefer": "respond-async"}) as response:
        place = response.headers["Location"]
    async with door.ask("beta", "DELETE", place) as response:
        await refused(response, 404, "not_found")
    going.set()
    async with door.ask("acme", "GET", f"{place}/answer?wait_s=20") as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "done"


async def test_one_idempotency_key_of_two_tenants_is_two_requests(door: Door) -> None:
    answers = {}
    for tenant in TENANTS:
        door.pipeline.worker.script = saying(f"for {tenant}")
        async with door.chat(tenant, headers={"Idempotency-Key": "same"}) as response:
            answers[tenant] = await response.json()
    assert [answers[tenant]["choices"][0]["message"]["content"] for tenant in TENANTS] == ["for acme", "for beta"]


async def test_another_tenants_files_and_batches_are_not_there(door: Door) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": door.pipeline.chat()}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="in.jsonl")
    async with door.ask("acme", "POST", "/v1/files", data=form) as response:
        file = (await response.json())["id"]
    order = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with door.ask("beta", "POST", "/v1/batches", json=order) as response:
        await refused(response, 404, "not_found")
    async with door.ask("acme", "POST", "/v1/batches", json=order) as response:
        batch = (await response.json())["id"]
    async with asyncio.timeout(30):
        while True:
            async with door.ask("acme", "GET", f"/v1/batches/{batch}") as response:
                found = await response.json()
            if found["status"] == "completed":
                break
            await asyncio.sleep(0.05)
    work = await door.pipeline.worker.taken.get()
    assert work.delivery.subject == f"kvrelay.prefill.acme.{door.pipeline.model}.batch"
    for method, path in (
        *(("GET", f"/v1/files/{name}{end}") for name in (file, found["output_file_id"]) for end in ("", "/content")),
        ("DELETE", f"/v1/files/{file}"),
        ("GET", f"/v1/batches/{batch}"),
        ("POST", f"/v1/batches/{batch}/cancel"),
    ):
        async with door.ask("beta", method, path) as response:
            await refused(response, 404, "not_found")
    for path in ("/v1/files", "/v1/batches"):
        async with door.ask("beta", "GET", path) as response:
            assert (await response.json())["data"] == []


def test_a_key_is_kept_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "keys.json"
    key = key_file.add(file, "acme", "web shop")
    kept = file.read_text(encoding="utf-8")
    assert key.rpartition("-")[2] not in kept and "web shop" in kept
    assert file.stat().st_mode & 0o777 == 0o600
    assert Keys(str(file)).check(f"bearer  {key}").tenant == "acme"


def test_a_change_keeps_mode_and_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = key_file.add(file, "acme")
    file.chmod(0o640)
    key_file.add(file, "beta")
    assert file.stat().st_mode & 0o777 == 0o640
    id_ = id_of(first) or ""
    assert key_file.revoke(file, id_).revoked == key_file.revoke(file, id_).revoked
    assert [(key.tenant, key.revoked is None) for key in key_file.read(file)] == [("acme", False), ("beta", True)]
    with pytest.raises(JobNotFound, match="no key 'nobody'"):
        key_file.revoke(file, "nobody")
    with pytest.raises(InvalidRequest, match="tenant"):
        key_file.add(file, "Acme Inc")


@pytest.mark.parametrize("text", ["", "[]", '{"keys": [{}]}', '{"keys": [], "more": 1}'])
def test_a_file_of_something_else_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(SetupError, match="does not exist"):
        Keys(str(file))
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SetupError, match=r"keys\.json"):
        Keys(str(file))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no..host"])
def test_a_door_to_the_network_needs_keys(host: str) -> None:
    with pytest.raises(SetupError, match="keys_file"):
        refuse_open_door(Api(host=host))
    refuse_open_door(Api(host=host, keys_file="keys.json"))
    refuse_open_door(Api(host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    refuse_open_door(Api(host=host))
