"""Cancelling a job: its end is written first, then its worker is told."""

from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from schemas.errors import KvrelayError
from schemas.subjects import ALL_CANCELS, cancel_subject, job_of_subject
from services.bus.chain import fail_job
from services.bus.connection import Bus


async def cancel_job(bus: Bus, tenant: str, job: str, error: KvrelayError) -> bool:
    """Ends a job with `error`. False if it had ended. Raises `BusUnavailable`.

    The message to the worker may get lost: then the chain refuses its next event, and it stops as well.
    """
    written = await fail_job(bus, tenant, job, error)
    await bus.publish(cancel_subject(tenant, job))
    return written


class CancelListener:
    """Calls `on_cancel(tenant, job)` for every cancelled job, of any worker: the callee knows its own."""

    def __init__(self, bus: Bus, on_cancel: Callable[[str, str], None]) -> None:
        self._bus = bus
        self._on_cancel = on_cancel
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(ALL_CANCELS, self._on_message)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)

    async def _on_message(self, message: Msg) -> None:
        self._on_cancel(*job_of_subject(message.subject))
