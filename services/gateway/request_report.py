"""What is told of a request, by any of its names: its job's report, or one for each of its prompts."""

from collections.abc import Iterable

from schemas.job_report import JobReport, RequestReport, joined
from schemas.openai import MAX_PROMPTS
from schemas.state import JobState
from services.bus.connection import Bus
from services.bus.job_state import look
from services.openai.request_names import prompt_job_id


async def find_request(bus: Bus, tenant: str, name: str, job_ids: Iterable[str]) -> JobReport | RequestReport | None:
    """The first of `job_ids`, which `name` may mean, that something is known of. Raises `BusUnavailable`."""
    for job in job_ids:
        report = await look(bus, tenant, job)
        if report.state is not JobState.UNKNOWN:
            return report
        parts = await _parts(bus, tenant, job)
        if parts:
            return joined(name, parts)
    return None


async def _parts(bus: Bus, tenant: str, job: str) -> list[JobReport]:
    parts: list[JobReport] = []
    for prompt in range(MAX_PROMPTS):
        report = await look(bus, tenant, prompt_job_id(job, prompt))
        if report.state is JobState.UNKNOWN:
            break
        parts.append(report)
    return parts
