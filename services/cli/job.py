"""`kvrelay job`: what became of a job, and how to stop it."""

import asyncio

import click
import msgspec

from schemas import wire
from schemas.errors import Cancelled, JobNotFound
from schemas.job_report import JobReport, RequestReport
from schemas.state import JobState
from schemas.subjects import check_job_id
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.jetstream import STREAM_NOT_FOUND, Refused
from services.bus.job_state import look
from services.cli.job_page import page
from services.cli.options import with_settings
from services.cli.pipeline_address import bus_url
from services.config import Settings
from services.gateway.request_report import find_request
from services.openai.request_names import RequestNames

_SHOW_EPILOG = """\b
Examples:
  kvrelay job show hello-1
  kvrelay job show chatcmpl-0f3c...           a request to the gateway, by the id of its answer
  kvrelay job show --json hello-1 | jq .state
  kvrelay job show --tenant acme --nats nats://queue:4222 hello-1
"""
_CANCEL_EPILOG = """\b
Examples:
  kvrelay job cancel hello-1
  kvrelay job cancel --queued hello-2         no worker has it yet, so that nobody knows of it
"""


@click.group()
def job() -> None:
    """Show and cancel single jobs."""


@job.command(epilog=_SHOW_EPILOG)
@click.argument("job_id", metavar="ID")
@with_settings("bus.url", "kv.data_dir", "bus.tenant")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a job, as GET /v1/requests/ID gives it.")
def show(settings: Settings, job_id: str, as_json: bool) -> None:
    """Print the state of a job: queued, prefilling, handed_off, decoding, done, failed or cancelled.

    With it come lengths, the worker that has or had the job, its deliveries, and its error. Exits 1 if nothing is known
    of the job: one that came over NATS is unknown until a worker has it, and all are forgotten 2 hours after their
    last event (bus.replies_max_age_s).
    """
    jobs = asyncio.run(_show(settings, check_job_id(job_id)))
    click.echo("\n".join(wire.encode(report).decode() for report in jobs) if as_json else "\n\n".join(map(page, jobs)))


@job.command(epilog=_CANCEL_EPILOG)
@click.argument("job_id", metavar="ID")
@with_settings("bus.url", "kv.data_dir", "bus.tenant")
@click.option("--queued", is_flag=True, help="Also a job that nobody knows: no job of this id will run for 2 hours.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a job: id, tenant, cancelled, state.")
def cancel(settings: Settings, job_id: str, queued: bool, as_json: bool) -> None:
    """End a job with the error `cancelled`: its readers are told, its worker stops.

    A job that has ended already is left as it is, and that is no error.
    """
    for answer in asyncio.run(_cancel(settings, check_job_id(job_id), queued)):
        if as_json:
            click.echo(wire.encode(answer))
        else:
            click.echo(f"{answer.id}: " + ("cancelled" if answer.cancelled else f"had ended already, {answer.state}"))


class _Answer(msgspec.Struct):
    """`cancelled`: by this command."""

    id: str
    tenant: str
    cancelled: bool
    state: JobState


async def _find(bus: Bus, name: str) -> list[JobReport]:
    """The job of this name, or those of a request with several prompts. Empty if nothing is known."""
    try:
        report = await find_request(bus, bus.settings.tenant, name, RequestNames().job_ids(bus.settings.tenant, name))
    except Refused as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        return []  # no worker has ever run there
    if isinstance(report, RequestReport):
        return report.jobs
    return [report] if report is not None else []


async def _show(settings: Settings, name: str) -> list[JobReport]:
    async with await Bus.connect(bus_url(settings), "kvrelay-cli", settings.bus) as bus:
        found = await _find(bus, name)
    if not found:
        raise _unknown(settings, name)
    return found


async def _cancel(settings: Settings, name: str, queued: bool) -> list[_Answer]:
    tenant = settings.bus.tenant
    async with await Bus.connect(bus_url(settings), "kvrelay-cli", settings.bus) as bus:
        jobs = [report.id for report in await _find(bus, name)]
        if not jobs and not queued:
            raise _unknown(settings, name, "; if it waits in the queue, --queued ends it")
        answers = []
        for job_id in jobs or [name]:
            written = await cancel_job(bus, tenant, job_id, Cancelled("the job was cancelled by its operator"))
            answers.append(_Answer(job_id, tenant, written, (await look(bus, tenant, job_id)).state))
        return answers


def _unknown(settings: Settings, job_id: str, advice: str = "") -> JobNotFound:
    return JobNotFound(
        f"nothing is known of job {job_id} of tenant {settings.bus.tenant}: no worker has had it yet, "
        f"or it is forgotten, or the id or tenant is another{advice}"
    )
