"""How many jobs wait, for those who watch a pipeline."""

from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.streams import Source


async def num_waiting(bus: Bus, source: Source) -> int:
    """Jobs of one lane that nobody has taken yet. Raises `BusUnavailable`, or `Refused` if there is no such queue."""
    info = await call(bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
    return int(info["num_pending"])
