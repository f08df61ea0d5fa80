"""`kvrelay drain`: workers are told over NATS to leave."""

import asyncio

import click

from schemas.beat import SILENT_AFTER_S
from schemas.errors import BusUnavailable, NoWorker
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.drain import ask_to_drain
from services.cli.live_workers import listening, workers
from services.cli.options import with_settings
from services.cli.pipeline_address import bus_url
from services.config import Settings

PAST_GRACE_S = SILENT_AFTER_S + 5.0


@click.command()
@click.argument("names", nargs=-1, metavar="[WORKER]...")
@with_settings("bus.url", "kv.data_dir")
@click.option("--all", "everybody", is_flag=True, help="All workers, at the same time.")
@click.option("--no-wait", is_flag=True, help="Return once they know, not once they are gone.")
def drain(settings: Settings, names: tuple[str, ...], everybody: bool, no_wait: bool) -> None:
    """Let workers leave: they take no more jobs, hand on those that they have, and exit within their grace.

    Nothing is lost or repeated. WORKER is a name that `kvrelay workers` shows. It needs no shell on the worker's host.
    Exit code 0: they are gone; 1: one is unknown, or still there when its grace (scheduler.grace_s) is over.

    What keeps workers running starts a new one in its place: `kvrelay up` does, at once, so there draining is how one
    worker is started again (`kvrelay restart` does it for all, without a gap). The last decode worker of a build
    finishes what is queued for it as far as the grace allows. Jobs of that build that are left then wait for another
    worker of it; they end with build_gone once it has been silent for 60 s.

    \b
    kvrelay drain decode-4711-1f2e3d4c
    kvrelay drain --all --nats nats://queue:4222
    """
    if bool(names) == everybody:
        raise click.UsageError("name the workers to drain (`kvrelay workers` lists them), or give --all")
    asyncio.run(_drain(settings, names, no_wait))


async def _drain(settings: Settings, names: tuple[str, ...], no_wait: bool) -> None:
    async with listening(bus_url(settings), settings.bus) as (bus, beats):
        chosen = _chosen(beats, names)
        grace_s = max([await _tell(bus, name) for name in chosen])
        if not no_wait:
            await _wait_until_gone(beats, chosen, grace_s)


def _chosen(beats: BeatTable, names: tuple[str, ...]) -> list[str]:
    live = [beat.process for beat in workers(beats)]
    unknown = [name for name in names if name not in live]
    if unknown or not live:
        told = f"these are alive: {', '.join(live)}" if live else "no worker is alive there"
        raise NoWorker(f"no worker {', '.join(unknown)}; {told}" if unknown else told)
    return list(names) or live


async def _tell(bus: Bus, name: str) -> float:
    """The worker's grace, in seconds."""
    reply = await ask_to_drain(bus, name)
    click.echo(f"{name}: drains, {reply.running} running, gone within {reply.grace_s:g} s")
    return reply.grace_s


async def _wait_until_gone(beats: BeatTable, names: list[str], grace_s: float) -> None:
    left, running = set(names), dict.fromkeys(names, -1)

    def look(table: BeatTable) -> bool:
        live = {beat.process: beat for beat in table.alive()}
        for name in sorted(left):
            if name not in live:
                click.echo(f"{name}: gone")
                left.discard(name)
            elif live[name].running != running[name]:
                if running[name] >= 0:
                    click.echo(f"{name}: {live[name].running} running")
                running[name] = live[name].running
        return not left

    if not await beats.wait_for(look, grace_s + PAST_GRACE_S):
        raise BusUnavailable(f"still there after {grace_s + PAST_GRACE_S:g} s: {', '.join(sorted(left))}; see its log")
