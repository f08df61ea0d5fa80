"""The streams and consumers of DESIGN section 4, made when they are missing and kept as they must be.

Of a stream that is there already, the settings decide the limits (in both directions, so that a change of the
configuration takes effect at the next start), and what correctness rests on is repaired. Two things are kept:
more replicas than the settings ask for, and the persist mode, which cannot be changed. See
infra/decisions/0008-existing-streams.md.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from schemas.batch import MAX_LIFE_S
from schemas.errors import BusUnavailable, SetupError
from schemas.subjects import (
    BATCHES_STREAM,
    BATCHES_SUBJECTS,
    DEAD_STREAM,
    DEAD_SUBJECTS,
    FILES_STREAM,
    FILES_SUBJECTS,
    REPLIES_STREAM,
    REPLIES_SUBJECTS,
    RESULTS_STREAM,
    RESULTS_SUBJECTS,
    Lane,
    Stage,
    consumer_filter,
    consumer_name,
    stream_name,
    stream_subjects,
)
from services.bus.connection import Bus
from services.bus.jetstream import STORE_NOT_MADE, STREAM_EXISTS, STREAM_NOT_FOUND, Refused, call

log = logging.getLogger("kvrelay.bus")

NS = 1_000_000_000
DAY_S = 86_400
RESULTS_MAX_AGE_S = MAX_LIFE_S
DEAD_MAX_AGE_S = 14 * DAY_S
DUPLICATE_WINDOW_S = 120
DEAD_MAX_BYTES = 1_000_000_000
MAX_WAITING = 8_192  # pull requests of all workers at one consumer; the default is 512
UNLIMITED = -1
RETRY_S = 0.5
CREATE_TRIES = 10
CREATE_PAUSE_S = 0.2

Config = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """One lane of one work queue of a model, read through one consumer. Prefill has one for all builds."""

    stage: Stage
    lane: Lane
    model: str
    build: str

    @property
    def stream(self) -> str:
        return stream_name(self.stage, self.model)

    @property
    def consumer(self) -> str:
        return consumer_name(self.stage, self.lane, self.build)

    @property
    def filter(self) -> str:
        return consumer_filter(self.stage, self.model, self.lane, self.build)


async def set_up(bus: Bus, model: str, build: str | None = None, *, adjusts: bool = True) -> None:
    """What a process needs before it works: the streams of `model`, and the consumers of `build` if it has one.

    `adjusts`: as in `ensure_streams`.
    Waits for a broker that is away: a worker that gave up would load its model again, which takes longer than most
    outages. Raises `SetupError` as `ensure_streams` does.
    """
    while True:
        try:
            await ensure_streams(bus, model, adjusts=adjusts)
            if build is not None:
                await ensure_consumers(bus, model, build)
            return
        except BusUnavailable as error:
            log.warning("%s: the streams cannot be looked at yet: %s", bus.name, error.message)
        await asyncio.sleep(RETRY_S)
        await bus.wait_connected()


async def ensure_streams(bus: Bus, model: str, *, adjusts: bool = True) -> None:
    """The streams that `model` needs. Raises `SetupError` for one that cannot be made to fit.

    `adjusts`: those that exist follow the settings of this process. A command that comes and goes leaves them alone:
    it may run anywhere, and settings that nobody gave it there would undo the operator's limits.
    Any number of processes may do this at once.
    """
    for config in [*(queue_config(bus, stage, model) for stage in Stage), *shared_configs(bus)]:
        await _ensure_stream(bus, config, adjusts=adjusts)


async def ensure_consumers(bus: Bus, model: str, build: str) -> None:
    """One consumer for each stage and lane of `build`; settings decide their limits."""
    for stage in Stage:
        for lane in Lane:
            await ensure_consumer(bus, Source(stage, lane, model, build))


async def ensure_consumer(bus: Bus, source: Source) -> float:
    """Makes or updates one consumer, and its streams if they are gone. Returns its ack_wait in seconds."""
    body = {"stream_name": source.stream, "action": "", "config": consumer_config(bus, source)}
    verb = f"CONSUMER.CREATE.{source.stream}.{source.consumer}"
    try:
        answer = await call(bus, verb, body)
    except Refused as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        await ensure_streams(bus, source.model)
        answer = await call(bus, verb, body)
    return float(answer["config"]["ack_wait"]) / NS


def queue_config(bus: Bus, stage: Stage, model: str) -> Config:
    """A work queue: only jobs that clients publish are bounded, a hand-off is never refused for being one too many."""
    bounded = stage is Stage.PREFILL
    return {
        "name": stream_name(stage, model),
        "subjects": stream_subjects(stage, model),
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": bus.settings.queue_max_messages if bounded else UNLIMITED,
        "max_bytes": bus.settings.queue_max_bytes if bounded else UNLIMITED,
        "max_age": 0,
        "duplicate_window": DUPLICATE_WINDOW_S * NS,
        "storage": "file",
        "num_replicas": bus.settings.replicas,
        "allow_direct": True,
    }


def shared_configs(bus: Bus) -> list[Config]:
    """The streams that all models share."""
    replies = _limits(bus, REPLIES_STREAM, REPLIES_SUBJECTS, bus.settings.replies_max_age_s)
    replies |= {"discard": "new", "max_bytes": bus.settings.replies_max_bytes}
    if bus.settings.replicas == 1 and not bus.clustered:
        replies["persist_mode"] = "async"
    results = _limits(bus, RESULTS_STREAM, RESULTS_SUBJECTS, RESULTS_MAX_AGE_S)
    results |= {"discard": "new", "max_bytes": bus.settings.results_max_bytes}
    # A dead letter must always find room, or its job could never be settled: the oldest make way.
    dead = _limits(bus, DEAD_STREAM, DEAD_SUBJECTS, DEAD_MAX_AGE_S)
    dead |= {"discard": "old", "max_bytes": DEAD_MAX_BYTES}
    files = _limits(bus, FILES_STREAM, FILES_SUBJECTS, RESULTS_MAX_AGE_S)
    files |= {"discard": "new", "max_bytes": bus.settings.files_max_bytes}
    batches = _limits(bus, BATCHES_STREAM, BATCHES_SUBJECTS, RESULTS_MAX_AGE_S)
    batches |= {"discard": "new", "max_msgs_per_subject": 1}
    return [replies, results, dead, files, batches]


def _limits(bus: Bus, name: str, subjects: str, max_age_s: float) -> Config:
    return {
        "name": name,
        "subjects": [subjects],
        "retention": "limits",
        "max_msgs": UNLIMITED,
        "max_bytes": UNLIMITED,
        "max_age": int(max_age_s * NS),
        # Message ids serve the work queues only, here the chain does their job.
        "duplicate_window": int(min(DUPLICATE_WINDOW_S, max_age_s) * NS),
        "storage": "file",
        "num_replicas": bus.settings.replicas,
        "allow_direct": True,
    }


def consumer_config(bus: Bus, source: Source) -> Config:
    """Never gives up on a message: what becomes of it is our decision, and after max_deliver it would be invisible."""
    return {
        "name": source.consumer,
        "durable_name": source.consumer,
        "filter_subject": source.filter,
        "ack_policy": "explicit",
        "ack_wait": int(bus.settings.ack_wait_s * NS),
        "max_deliver": UNLIMITED,
        "max_ack_pending": UNLIMITED,
        "max_waiting": MAX_WAITING,
        "deliver_policy": "all",
        "replay_policy": "instant",
    }


async def _ensure_stream(bus: Bus, wanted: Config, *, adjusts: bool) -> None:
    name = wanted["name"]
    for tries_left in reversed(range(CREATE_TRIES)):
        try:
            await call(bus, f"STREAM.CREATE.{name}", wanted)
            return
        except Refused as error:
            if error.err_code == STREAM_EXISTS:
                break
            if error.err_code != STORE_NOT_MADE or not tries_left:
                raise SetupError(f"stream {name} cannot be made: {error.message}") from error
        await asyncio.sleep(CREATE_PAUSE_S)  # the server is still removing the files of one of this name
    if not adjusts:
        return
    existing: Config = (await call(bus, f"STREAM.INFO.{name}"))["config"]
    merged = existing | wanted
    merged["num_replicas"] = max(existing["num_replicas"], wanted["num_replicas"])
    if "persist_mode" in existing:
        merged["persist_mode"] = existing["persist_mode"]
    else:
        merged.pop("persist_mode", None)
    changed = {key: value for key, value in merged.items() if existing.get(key) != value}
    if not changed:
        return
    try:
        await call(bus, f"STREAM.UPDATE.{name}", merged)
    except Refused as error:
        raise SetupError(
            f"stream {name} exists with other settings ({', '.join(changed)}) and cannot be changed: {error.message}; "
            f"remove it with `nats stream rm {name}` once it is empty"
        ) from error
    log.warning("stream %s updated: %s", name, {key: (existing.get(key), value) for key, value in changed.items()})
