"""Clients of a pipeline that breaks under them: they try again what was refused, and remember what they were shown."""

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from schemas.errors import BusUnavailable
from schemas.events import Event, Finish, Token
from schemas.subjects import DEFAULT_TENANT, MSG_ID_HEADER, Lane
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import job_msg_id, submit_job
from services.bus.reader import follow
from tests.chaos.load import MODEL
from tests.chaos.mix import Order

RETRY_S = 0.3
SILENCE_S = 180.0  # under faults a job may wait for a while; for ever is what is wrong
LATE_S = 10.0
ANSWER_TIMEOUT_S = 600.0
_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass
class Shown:
    """What a client saw. `job` None: the connection broke before it learnt the id."""

    job: str | None
    texts: dict[int, str]
    whole: bool


class Clients:
    """All of a run; `prefix` makes their job ids unique."""

    def __init__(self, bus: Bus, http: str, session: aiohttp.ClientSession, prefix: str, rng: random.Random) -> None:
        self._bus = bus
        self._http = http
        self._session = session
        self._prefix = prefix
        self._rng = rng

    async def run(self, order: Order) -> Shown:
        if order.way in ("nats", "nats late"):
            return await self._over_nats(order)
        return await self._over_http(order)

    async def _over_nats(self, order: Order) -> Shown:
        job = f"{self._prefix}-{order.number}"
        await self._submit(job, {**order.kind.fields, "id": job, "cache_salt": order.salt})
        if order.way == "nats late":
            await asyncio.sleep(self._rng.uniform(0, LATE_S))
        texts: dict[int, str] = {}
        async for event in follow(self._bus, DEFAULT_TENANT, job, SILENCE_S):
            _note(texts, event)
        return Shown(job, texts, True)

    async def _submit(self, job: str, fields: dict[str, Any]) -> None:
        """Until the queue has it: a publish whose answer was lost is repeated under the same id."""
        while True:
            try:
                headers = {MSG_ID_HEADER: job_msg_id(DEFAULT_TENANT, job)}
                await submit_job(self._bus, DEFAULT_TENANT, MODEL, Lane.INTERACTIVE, encode(fields), headers)
                return
            except BusUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _over_http(self, order: Order) -> Shown:
        """Until the gateway takes it. A connection that breaks later is not repeated: the caller decides."""
        route = "chat/completions" if "messages" in order.kind.fields else "completions"
        body = {"model": MODEL, **order.kind.fields, "cache_salt": order.salt, "stream": order.way == "sse"}
        while True:
            shown = Shown(None, {}, False)
            try:
                timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
                async with self._session.post(f"{self._http}/v1/{route}", json=body, timeout=timeout) as answer:
                    if answer.status == 200:
                        await (_read_events(answer, shown) if body["stream"] else _read_whole(answer, shown))
                        return shown
                    if answer.status not in (429, 499, 503):
                        raise AssertionError(f"{answer.status} {await answer.text()}")
            except aiohttp.ClientConnectorError:
                pass  # nobody listens: a gateway is being started
            except _BROKEN:
                return shown
            await asyncio.sleep(RETRY_S)


async def _read_events(answer: aiohttp.ClientResponse, shown: Shown) -> None:
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            shown.whole = True
            return
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            return
        _note_chunk(chunk, shown)


async def _read_whole(answer: aiohttp.ClientResponse, shown: Shown) -> None:
    _note_chunk(await answer.json(), shown)
    shown.whole = True


def _note_chunk(chunk: dict[str, Any], shown: Shown) -> None:
    shown.job = "req-" + str(chunk["id"]).rpartition("-")[2]
    for choice in chunk["choices"]:
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        shown.texts[choice["index"]] = shown.texts.get(choice["index"], "") + (said.get("content") or "")


def _note(texts: dict[int, str], event: Event) -> None:
    if isinstance(event, (Token, Finish)):
        texts[event.choice] = texts.get(event.choice, "") + event.text
