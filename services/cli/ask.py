"""Publishes one job to NATS and follows its events."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from schemas import wire
from schemas.errors import Cancelled, IdConflict
from schemas.events import Event, Start
from schemas.job import Job, job_digest
from schemas.subjects import MSG_ID_HEADER, Lane
from services import telemetry
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.publish import job_msg_id, submit_job
from services.bus.reader import follow
from services.cli.pipeline_address import bus_url, served_slug
from services.config import Bus as BusSettings
from services.config import Settings

PATIENCE_S = 3.0


class Target(NamedTuple):
    """Whom to ask. `model` is the slug of the subject."""

    url: str
    tenant: str
    model: str
    lane: Lane = Lane.INTERACTIVE
    bus: BusSettings = BusSettings()

    @classmethod
    def of(cls, settings: Settings, lane: Lane = Lane.INTERACTIVE) -> "Target":
        """Raises `SetupError` if no pipeline can be found."""
        return cls(bus_url(settings), settings.bus.tenant, served_slug(settings), lane, settings.bus)


async def ask(
    target: Target, job: Job, *, cancel_on_exit: bool = False, on_silence: Callable[[], None] | None = None
) -> AsyncGenerator[Event, None]:
    """All events of the job, up to its end.

    Who stops reading stops nothing, unless `cancel_on_exit`. `on_silence` is called once if nothing is heard for
    `PATIENCE_S`. Raises what `submit_job` and `follow` raise, and `IdConflict` for the id of another job.
    """
    assert job.id is not None
    bus = await Bus.connect(target.url, "kvrelay-cli", target.bus)
    impatience = asyncio.get_running_loop().call_later(PATIENCE_S, on_silence or _nothing)
    ours_to_cancel = False
    try:
        with telemetry.span("client.request", tenant=target.tenant):
            headers = {MSG_ID_HEADER: job_msg_id(target.tenant, job.id), **telemetry.inject()}
        await submit_job(bus, target.tenant, target.model, target.lane, wire.encode(job), headers)
        ours_to_cancel = cancel_on_exit
        async for event in follow(bus, target.tenant, job.id):
            impatience.cancel()
            if isinstance(event, Start) and event.digest != job_digest(job):
                ours_to_cancel = False
                raise IdConflict(f"the id {job.id} names another job already: choose another, or leave it out")
            yield event
        ours_to_cancel = False
    finally:
        impatience.cancel()
        if ours_to_cancel:
            await cancel_job(bus, target.tenant, job.id, Cancelled("the reader asked for it to stop when it left"))
        await bus.close()


def _nothing() -> None:
    pass
