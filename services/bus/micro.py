"""Answers `nats micro ping | info | stats`: every process is an instance of the service of its role.

The protocol is spoken here and not by nats-py's own service, whose answers would go past the fence of `Bus`.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_args

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.beat import Beat
from schemas.errors import BusUnavailable
from schemas.micro import EndpointInfo, EndpointStats, Info, Ping, Stats, Verb, service_name, service_subjects
from schemas.subjects import ALL_WATCHED, Stage, decode_subject, prefill_subject, stream_name
from schemas.version import own_version
from schemas.wire import encode
from services.bus.connection import Bus

DESCRIPTIONS = {
    "prefill": "prompts to KV blocks and first tokens",
    "decode": "stored blocks to streams of tokens",
    "both": "prompts to streams of tokens",
    "gateway": "OpenAI's HTTP API over the queue",
}


@dataclass
class _Count:
    requests: int = 0
    errors: int = 0
    spent_ns: int = 0
    last_error: str = ""


class Tally:
    """What a process has done since it started, by endpoint."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = defaultdict(_Count)

    def note(self, endpoint: str, began_ns: int, error: str = "") -> None:
        """`began_ns` by `time.perf_counter_ns`; `error`: the code of what it ended with, "" if it went well."""
        count = self._counts[endpoint]
        count.requests += 1
        count.spent_ns += time.perf_counter_ns() - began_ns
        if error:
            count.errors += 1
            count.last_error = error

    def of(self, endpoint: EndpointInfo, beat: Beat) -> EndpointStats:
        count = self._counts[endpoint.name]
        return EndpointStats(
            name=endpoint.name,
            subject=endpoint.subject,
            queue_group=endpoint.queue_group,
            num_requests=count.requests,
            num_errors=count.errors,
            last_error=count.last_error,
            processing_time=count.spent_ns,
            average_processing_time=count.spent_ns // max(count.requests, 1),
            data=beat,
        )


def endpoints_of(beat: Beat) -> list[EndpointInfo]:
    """What a process listens to; a worker that is still loading has none."""
    if beat.role == "gateway":
        return [EndpointInfo(name="watched", subject=ALL_WATCHED)]
    model, found = beat.model, []
    if model and beat.plays("prefill"):
        subject = prefill_subject("*", model, "*")
        found.append(EndpointInfo(name="prefill", subject=subject, queue_group=stream_name(Stage.PREFILL, model)))
    if beat.build and beat.plays("decode"):
        subject = decode_subject(model, beat.build, "*")
        found.append(EndpointInfo(name="decode", subject=subject, queue_group=stream_name(Stage.DECODE, model)))
    return found


class MicroService:
    """This process's answers, from `start` to `close`. `look`: its beat now, and what it has done."""

    def __init__(self, bus: Bus, look: Callable[[], tuple[Beat, Tally]]) -> None:
        self._bus = bus
        self._look = look
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._version = own_version()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        beat, _ = self._look()
        for verb in get_args(Verb):
            for subject in service_subjects(verb, service_name(beat.role), beat.process):
                self._subscriptions.append(await self._bus.subscribe(subject, self._on_message))

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await self._bus.unsubscribe(subscription)

    async def _on_message(self, message: Msg) -> None:
        if message.reply:
            with contextlib.suppress(BusUnavailable):
                await self._bus.publish(message.reply, encode(self._answer(message.subject.split(".")[1])))

    def _answer(self, verb: str) -> Ping | Info | Stats:
        beat, tally = self._look()
        told = {"state": beat.state, "model": beat.model, "build": beat.build, "host": beat.host}
        head: dict[str, Any] = {
            "name": service_name(beat.role),
            "id": beat.process,
            "version": self._version,
            "metadata": {name: value for name, value in told.items() if value},
        }
        endpoints = endpoints_of(beat)
        if verb == "PING":
            return Ping(**head)
        if verb == "INFO":
            return Info(**head, description=DESCRIPTIONS[beat.role], endpoints=endpoints)
        return Stats(**head, started=self._started, endpoints=[tally.of(endpoint, beat) for endpoint in endpoints])
