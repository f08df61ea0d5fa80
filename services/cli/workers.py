"""`kvrelay workers`: who works on a NATS."""

import asyncio
import time

import click

from schemas.beat import Beat
from schemas.wire import encode
from services.cli.live_workers import listening
from services.cli.live_workers import workers as live
from services.cli.options import with_settings
from services.cli.pipeline_address import bus_url
from services.config import Settings

_HEADINGS = ("NAME", "ROLE", "MODEL", "BUILD", "STATE", "RUNNING", "HOST", "SINCE")


@click.command()
@with_settings("bus.url", "kv.data_dir")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: the last beat of each worker.")
def workers(settings: Settings, as_json: bool) -> None:
    """List the prefill and decode workers that are alive.

    They are those of the pipeline that runs on the data folder, or of the NATS that is named. RUNNING is sequences of
    as many as fit. A worker that died is listed for another 3.5 seconds.

    \b
    kvrelay workers
    kvrelay workers --nats nats://queue:4222 --json
    """
    found = asyncio.run(_find(settings))
    if as_json:
        for beat in found:
            click.echo(encode(beat))
    elif found:
        _print([_HEADINGS, *map(_row, found)])
    else:
        click.echo("no worker is alive: start one with `kvrelay up`, `kvrelay prefill` or `kvrelay decode`", err=True)


async def _find(settings: Settings) -> list[Beat]:
    async with listening(bus_url(settings), settings.bus) as (_, beats):
        return live(beats)


def _row(beat: Beat) -> tuple[str, ...]:
    state = f"{beat.state} ({', '.join(beat.reasons)})" if beat.reasons else beat.state
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - beat.uptime_s))
    load = f"{beat.running}/{beat.capacity}"
    return beat.process, beat.role, beat.model or "-", beat.build or "-", state, load, beat.host, since


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
