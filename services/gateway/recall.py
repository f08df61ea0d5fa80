"""Finds a request again by its jobs' first events, whichever gateway took it."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from schemas.asked import Asked
from schemas.errors import BY_CODE, Cancelled, Internal
from schemas.events import Accepted, Error
from schemas.subjects import retry_id
from services.bus.connection import Bus
from services.bus.history import StoredEvents, first_message, last_message
from services.openai.request_names import job_id, prompt_job_id


class Recalled(NamedTuple):
    """`age_s`: since it was accepted."""

    tenant: str
    asked: Asked
    model: str
    age_s: float

    @property
    def job_ids(self) -> list[str]:
        num = self.asked.num_prompts
        return [job_id(self.asked.key, prompt, num) for prompt in range(num)]


async def recall(bus: Bus, tenant: str, job_ids: Iterable[str]) -> Recalled | None:
    """The request of the first of `job_ids` that is one's; None if there is none. Raises `BusUnavailable`."""
    for job in job_ids:
        for name in (job, prompt_job_id(job, 0)):
            found = await recall_job(bus, tenant, name)
            if found is not None:
                return found
    return None


async def recall_job(bus: Bus, tenant: str, job: str) -> Recalled | None:
    first = await first_message(bus, tenant, job)
    accepted = next((event for event in first.events if isinstance(event, Accepted)), None) if first else None
    if first is None or accepted is None or accepted.asked is None or accepted.model is None:
        return None
    return Recalled(tenant, accepted.asked, accepted.model, max(0.0, bus.now() - first.stored_at))


async def newest_try(bus: Bus, tenant: str, key: str, num_prompts: int) -> tuple[str, bool]:
    """The request key that a client's `key` stands for now, and whether such a request was begun.

    A try that ended in a way that speaks for another one is followed by `<key>-r1`, `<key>-r2` and so on.
    """
    for attempt in itertools.count():
        name = retry_id(key, attempt) if attempt else key
        jobs = [job_id(name, prompt, num_prompts) for prompt in range(num_prompts)]
        ends = [await last_message(bus, tenant, job) for job in jobs]
        if not any(end is not None and _calls_for_another(end) for end in ends):
            return name, any(end is not None for end in ends)
    raise AssertionError


def _calls_for_another(stored: StoredEvents) -> bool:
    """A job was cancelled because its client left, who is here again; or might go well now."""
    error = next((event for event in stored.events if isinstance(event, Error)), None)
    return error is not None and (BY_CODE.get(error.code, Internal).retryable or error.code == Cancelled.code)
