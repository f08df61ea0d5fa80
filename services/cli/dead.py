"""`kvrelay dead`: the jobs that were given up, and what to do with them."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import click

from schemas import wire
from schemas.errors import BusUnavailable, JobNotFound, KvrelayError
from services.bus.connection import Bus
from services.bus.dead_letters import DeadLetter, payload_of, remove
from services.bus.dead_retry import retry as retry_letter
from services.cli import dead_page
from services.cli.dead_choice import Choice, chosen, each, with_choice
from services.cli.options import with_settings
from services.cli.pipeline_address import bus_url
from services.config import Settings

_where = with_settings("bus.url", "kv.data_dir")
_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a dead letter.")

_EXAMPLES = """\b
Examples:
  kvrelay dead ls --code poisoned
  kvrelay dead show hello-1
  kvrelay dead retry hello-1                   publishes it again, as hello-1-r1
  kvrelay dead retry --all --code unsupported_version --yes
  kvrelay dead drop --seq 17
"""


@click.group(epilog=_EXAMPLES)
def dead() -> None:
    """List, show, retry and drop the jobs that were given up.

    A job is given up when it brought its worker down three times while it ran alone (poisoned), when its id was
    another job's (id_conflict), when it is of a newer version than its worker (unsupported_version), and when its
    message could not be read at all (invalid_request). Its readers have been told by then. The letters are kept for 14
    days. One job may have several: --seq names one.
    """


@dead.command(epilog="\b\nExamples:\n  kvrelay dead ls\n  kvrelay dead ls --tenant acme --code poisoned --json")
@_where
@with_choice("tenant", "code")
@_as_json
def ls(settings: Settings, choice: Choice, as_json: bool) -> None:
    """List dead letters, oldest first, of all tenants unless one is named."""

    async def print_all() -> None:
        async with await _connect(settings) as bus:
            if not as_json:
                click.echo(dead_page.HEAD)
            async for letter in each(bus, choice):
                click.echo(wire.encode(dead_page.plain(letter)) if as_json else dead_page.line(letter))

    asyncio.run(print_all())


@dead.command(epilog="\b\nExamples:\n  kvrelay dead show hello-1\n  kvrelay dead show --seq 17 --json | jq .payload")
@_where
@with_choice("job", "tenant", "seq")
@_as_json
def show(settings: Settings, choice: Choice, as_json: bool) -> None:
    """Print all headers and the payload of a job's dead letters. What is no JSON is shown with escapes."""

    async def show_one(bus: Bus, letter: DeadLetter) -> str:
        payload = await payload_of(bus, letter)
        if payload is None:
            raise JobNotFound("it was removed meanwhile")
        if as_json:
            return wire.encode(dead_page.plain_page(letter, payload)).decode()
        return dead_page.page(letter, payload) + "\n"

    asyncio.run(_do(settings, _find(settings, choice), show_one))


@dead.command(epilog="\b\nExamples:\n  kvrelay dead retry hello-1\n  kvrelay dead retry --all --tenant acme --yes")
@_where
@with_choice("job", "tenant", "code", "seq", "all")
@_as_json
def retry(settings: Settings, choice: Choice, as_json: bool) -> None:
    """Publish jobs again and remove their dead letters.

    The new id is the old one with -r1 (or the next free number) behind it. A job is published as it was, to the queue
    it came from; a hand-off as the job that it came from, with its seed. Nobody watches a job that was published again:
    it runs to its end, and its answer is read under the new id. What cannot be published stays as it is.
    """
    given_out: set[tuple[str, str]] = set()

    async def retry_one(bus: Bus, letter: DeadLetter) -> str:
        new_id = await retry_letter(bus, letter, {name for tenant, name in given_out if tenant == letter.tenant})
        given_out.add((letter.tenant, new_id))
        if as_json:
            return wire.encode({**dead_page.plain(letter), "new_id": new_id}).decode()
        return f"{letter.job} -> {new_id}"

    asyncio.run(_do(settings, _agreed("retry", choice, _find(settings, choice)), retry_one))


@dead.command(epilog="\b\nExamples:\n  kvrelay dead drop hello-1\n  kvrelay dead drop --all --code id_conflict")
@_where
@with_choice("job", "tenant", "code", "seq", "all")
@_as_json
def drop(settings: Settings, choice: Choice, as_json: bool) -> None:
    """Remove dead letters for good."""

    async def drop_one(bus: Bus, letter: DeadLetter) -> str:
        dropped = await remove(bus, letter)
        if as_json:
            return wire.encode({**dead_page.plain(letter), "dropped": dropped}).decode()
        return f"{letter.job}: {'dropped' if dropped else 'was gone already'}"

    asyncio.run(_do(settings, _agreed("drop", choice, _find(settings, choice)), drop_one))


async def _connect(settings: Settings) -> Bus:
    return await Bus.connect(bus_url(settings), "kvrelay-cli", settings.bus)


def _find(settings: Settings, choice: Choice) -> list[DeadLetter]:
    """Raises `JobNotFound` if there is none, and `UsageError` for a job id of several tenants."""

    async def find() -> list[DeadLetter]:
        async with await _connect(settings) as bus:
            return await chosen(bus, choice)

    return asyncio.run(find())


def _agreed(verb: str, choice: Choice, letters: list[DeadLetter]) -> list[DeadLetter]:
    """`letters`, if it may be done to all of them."""
    if choice.all and letters and not choice.yes:
        try:
            agreed = click.confirm(f"{verb} {len(letters)} dead letters?", err=True)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise click.UsageError("nothing was done: --all asks first, say --yes where nobody can answer") from None
        if not agreed:
            raise click.ClickException("nothing was done")
    return letters


async def _do(settings: Settings, letters: list[DeadLetter], act: Callable[[Bus, DeadLetter], Awaitable[str]]) -> None:
    """Prints what `act` says of each; what went wrong with one keeps none of the others, but makes the exit code 1."""
    failed = 0
    async with await _connect(settings) as bus:
        for letter in letters:
            try:
                click.echo(await act(bus, letter))
            except BusUnavailable:
                raise
            except KvrelayError as error:
                failed += 1
                click.echo(f"kvrelay: {letter.job} (--seq {letter.sequence}): {error.code}: {error.message}", err=True)
    if failed:
        raise click.ClickException(f"{failed} of {len(letters)} dead letters are left as they were")
