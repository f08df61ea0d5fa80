"""How many jobs wait, for those who watch a pipeline."""

from typing import NamedTuple

from schemas.subjects import DEAD_STREAM, Stage, build_and_lane, stream_name
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.streams import Source


class Depth(NamedTuple):
    """Jobs of one lane: `waiting` for somebody to take them, `taken` and not settled."""

    waiting: int
    taken: int


async def depth(bus: Bus, source: Source) -> Depth:
    """Raises `BusUnavailable`, or `Refused` if there is no such queue."""
    info = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
    return Depth(int(info["num_pending"]), int(info["num_ack_pending"]))


async def num_waiting(bus: Bus, source: Source) -> int:
    """Jobs of one lane that nobody has taken yet. Raises as `depth` does."""
    return (await depth(bus, source)).waiting


async def num_unsettled(bus: Bus, source: Source) -> int:
    """The same, with those that somebody has taken and not settled."""
    return sum(await depth(bus, source))


async def num_dead(bus: Bus) -> int:
    """Jobs that were put aside and wait for an operator. Raises `BusUnavailable` or `Refused`."""
    return int((await call(bus, f"STREAM.INFO.{DEAD_STREAM}"))["state"]["messages"])


async def queued_sources(bus: Bus, stage: Stage, model: str) -> list[Source]:
    """The lanes of all builds in which jobs are, taken or not. `stage` is one whose queue has a subject a build."""
    info = await call(bus, f"STREAM.INFO.{stream_name(stage, model)}", {"subjects_filter": ">"})
    sources = []
    for subject in info["state"].get("subjects") or {}:
        build, lane = build_and_lane(subject)
        sources.append(Source(stage, lane, model, build))
    return sources
