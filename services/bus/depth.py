"""How many jobs wait, for those who watch a pipeline."""

from schemas.subjects import Stage, build_and_lane, stream_name
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.streams import Source


async def num_waiting(bus: Bus, source: Source) -> int:
    """Jobs of one lane that nobody has taken yet. Raises `BusUnavailable`, or `Refused` if there is no such queue."""
    info = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
    return int(info["num_pending"])


async def num_unsettled(bus: Bus, source: Source) -> int:
    """The same, with those that somebody has taken and not settled."""
    info = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
    return int(info["num_pending"]) + int(info["num_ack_pending"])


async def queued_sources(bus: Bus, stage: Stage, model: str) -> list[Source]:
    """The lanes of all builds in which jobs are, taken or not. `stage` is one whose queue has a subject a build."""
    info = await call(bus, f"STREAM.INFO.{stream_name(stage, model)}", {"subjects_filter": ">"})
    sources = []
    for subject in info["state"].get("subjects") or {}:
        build, lane = build_and_lane(subject)
        sources.append(Source(stage, lane, model, build))
    return sources
