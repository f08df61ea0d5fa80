"""`kvrelay batch`: many requests in a file, here and now, or left to a gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import click

from schemas import wire
from schemas.batch import ENDED, ENDPOINTS, Batch, BatchRecord
from schemas.errors import NoWorker
from services.batch.ordering import cancel_batch, new_batch
from services.batch.shelf import Shelf
from services.bus.connection import Bus
from services.bus.streams import set_up
from services.cli.batch_output import place_of, rewrite
from services.cli.batch_run import run_file
from services.cli.live_workers import listening
from services.cli.options import with_settings
from services.cli.pipeline_address import bus_url, served_slug
from services.config import Settings

_PART_BYTES = 1 << 20
_RUN_EPILOG = """\b
Examples:
  kvrelay batch run in.jsonl -o out.jsonl
  kvrelay batch run in.jsonl -o out.jsonl --nats nats://queue:4222   on the workers that run there
  kvrelay batch run in.jsonl -o out.jsonl --round 2                  anew: answers of before do not count
"""

_input = click.argument("file", metavar="IN.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_endpoint = click.option(
    "--endpoint", type=click.Choice(list(ENDPOINTS)), default=next(iter(ENDPOINTS)), show_default=True,
    help="What the lines ask; their url must say the same.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="OpenAI's batch object.")
_output = click.option(
    "-o", "--output", metavar="OUT.JSONL", required=True, type=click.Path(dir_okay=False, path_type=Path),
    help="One line a request, answered or failed.",
)  # fmt: skip


@click.group()
def batch() -> None:
    """Run files of requests on the capacity that others leave (OpenAI's batch format)."""


@batch.command(epilog=_RUN_EPILOG)
@_input
@_output
@with_settings("bus.url", "kv.data_dir", "compute.model", "bus.tenant")
@_endpoint
@click.option(
    "--round", "round_number", type=click.IntRange(0), default=0, metavar="N",
    help="Another number runs all lines anew, although this file was run before.",
)  # fmt: skip
def run(settings: Settings, file: Path, output: Path, endpoint: str, round_number: int) -> None:
    """Answer every line of IN.JSONL.

    Needs no gateway, and starts a pipeline itself unless one runs on the data folder. After Ctrl-C or a crash the same
    command goes on where it stopped, also without the output file: answers are kept for 30 days (on the results stream
    of the NATS that was used). Exits 1 if a line failed.
    """
    failed = run_file(settings, file, output, endpoint, round_number=round_number)
    if failed:
        raise click.exceptions.Exit(1)


@batch.command()
@_input
@with_settings("bus.url", "kv.data_dir", "compute.model", "bus.tenant")
@_endpoint
@click.option("--window", default="24h", show_default=True, help="When what is not done expires.")
@_json
def submit(settings: Settings, file: Path, endpoint: str, window: str, as_json: bool) -> None:
    """Leave IN.JSONL to the gateway that runs, and print the batch's id."""
    made = asyncio.run(_submit(settings, file, endpoint, window))
    click.echo(_page(made) if as_json else made.id)


@batch.command()
@click.argument("batch_id", metavar="ID")
@with_settings("bus.url", "kv.data_dir", "bus.tenant")
@_json
def status(settings: Settings, batch_id: str, as_json: bool) -> None:
    """Print how far a batch is."""
    found = asyncio.run(_look(settings, batch_id, "show"))
    click.echo(_page(found) if as_json else _line(found))


@batch.command()
@click.argument("batch_id", metavar="ID")
@with_settings("bus.url", "kv.data_dir", "bus.tenant")
def cancel(settings: Settings, batch_id: str) -> None:
    """Stop a batch; what it has answered stays."""
    click.echo(_line(asyncio.run(_look(settings, batch_id, "cancel"))))


@batch.command()
@click.argument("batch_id", metavar="ID")
@_output
@with_settings("bus.url", "kv.data_dir", "bus.tenant")
@click.option("--wait", is_flag=True, help="Until it has ended.")
def fetch(settings: Settings, batch_id: str, output: Path, wait: bool) -> None:
    """Write the answers and failures of a batch that there are so far."""
    click.echo(_line(asyncio.run(_fetch(settings, batch_id, place_of(output), wait))), err=True)


async def _submit(settings: Settings, file: Path, endpoint: str, window: str) -> Batch:
    async with listening(bus_url(settings), settings.bus) as (bus, beats):
        if not beats.alive("gateway"):
            raise NoWorker("no gateway runs that would take the batch: start one, or use `kvrelay batch run`")
        await set_up(bus, served_slug(settings), adjusts=False)
        shelf = Shelf(bus, settings.bus.tenant)
        draft = new_batch("", endpoint, window, bus.now())
        with file.open("rb") as opened:

            async def parts() -> AsyncIterator[bytes]:
                while part := await asyncio.to_thread(opened.read, _PART_BYTES):
                    yield part

            stored = await shelf.put_file(parts(), file.name, "batch")
        made = new_batch(stored.id, endpoint, window, draft.created_at)
        await shelf.put_batch(BatchRecord(batch=made))
        return made


async def _look(settings: Settings, batch_id: str, what: Literal["show", "cancel"]) -> Batch:
    async with await Bus.connect(bus_url(settings), "kvrelay-cli", settings.bus) as bus:
        shelf = Shelf(bus, settings.bus.tenant)
        if what == "cancel":
            return await cancel_batch(shelf, batch_id, bus.now())
        return (await shelf.batch(batch_id))[1].batch


async def _fetch(settings: Settings, batch_id: str, output: Path, wait: bool) -> Batch:
    async with await Bus.connect(bus_url(settings), "kvrelay-cli", settings.bus) as bus:
        shelf = Shelf(bus, settings.bus.tenant)
        while True:
            found = (await shelf.batch(batch_id))[1].batch
            if found.status in ENDED or not wait:
                break
            await asyncio.sleep(1.0)
        await rewrite(bus, settings.bus.tenant, batch_id, output)
        return found


def _page(found: Batch) -> bytes:
    return wire.encode(found)


def _line(found: Batch) -> str:
    counts = found.request_counts
    failures = "; ".join(error.message for error in found.errors.data[:3]) if found.errors else ""
    told = f"{found.id}: {found.status}, {counts.completed + counts.failed} of {counts.total} lines"
    return told + (f", {counts.failed} failed" if counts.failed else "") + (f": {failures}" if failures else "")
