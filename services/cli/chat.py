"""`kvrelay chat`: a conversation in the terminal. Each turn is a job whose prompt is everything said so far."""

import asyncio
import contextlib
import sys
from typing import Any

import click

from schemas.errors import ContextLengthExceeded, KvrelayError
from schemas.subjects import Lane
from services.cli.ask import Target, ask
from services.cli.options import with_settings
from services.cli.sampling_options import make_job, with_sampling
from services.cli.transcript import Transcript
from services.config import Settings

Messages = list[dict[str, str]]


@click.command()
@with_settings("bus.url", "kv.data_dir", "compute.model", "bus.tenant")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--quiet", is_flag=True, help="Only the answers: no summaries on stderr.")
@with_sampling
def chat(settings: Settings, sampling: dict[str, Any], lane: Lane, system: str | None, quiet: bool) -> None:
    """Talk to the model. Each turn starts from the KV blocks of the ones before it.

    /reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D or /quit leaves. Answers are greedy (temperature
    0) unless an option says otherwise.
    """
    if sampling.pop("n", 1) != 1:
        raise click.UsageError("a chat has one answer a turn: leave out --n")
    sampling.pop("id", None)  # each turn is a job of its own
    target = Target.of(settings, lane)
    opening: Messages = [{"role": "system", "content": system}] if system is not None else []
    said = list(opening)
    while (line := _read_line()) not in (None, "/quit"):
        if line == "/reset":
            said = list(opening)
        elif line:
            said = _turn(target, sampling, [*said, {"role": "user", "content": line}], quiet=quiet)


def _read_line() -> str | None:
    """None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _turn(target: Target, sampling: dict[str, Any], messages: Messages, *, quiet: bool) -> Messages:
    """Prints the answer. Returns the conversation with it, or without the question if there is none."""
    transcript = Transcript(sys.stdout)
    try:
        asyncio.run(_answer(target, sampling, messages, transcript))
    except KeyboardInterrupt:
        click.echo()
    except KvrelayError as error:
        click.echo(f"\n{error.code}: {error.message}", err=True)
        if isinstance(error, ContextLengthExceeded):
            click.echo("the conversation does not fit any more: /reset starts a new one", err=True)
        return messages[:-1]
    else:
        if not quiet:
            click.echo(f"({transcript.summary()})", err=True)
    return [*messages, {"role": "assistant", "content": transcript.text}] if transcript.text else messages[:-1]


async def _answer(target: Target, sampling: dict[str, Any], messages: Messages, transcript: Transcript) -> None:
    job = make_job(sampling, messages=messages)
    async with contextlib.aclosing(ask(target, job, cancel_on_exit=True)) as events:
        async for event in events:
            transcript.take(event)
