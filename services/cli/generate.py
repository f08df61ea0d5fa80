"""`kvrelay generate`: one job over NATS."""

import asyncio
import contextlib
import io
import signal
import sys
from typing import Any

import click

from schemas.events import encode_events
from schemas.job import Job
from schemas.subjects import Lane
from services.cli.ask import Target, ask
from services.cli.options import with_settings
from services.cli.sampling_options import make_job, with_sampling
from services.cli.transcript import Transcript
from services.config import Settings


@click.command()
@click.argument("text")
@with_settings("bus.url", "kv.data_dir", "compute.model", "bus.tenant")
@click.option("--raw", is_flag=True, help="TEXT is the prompt itself: no chat template.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--json", "as_json", is_flag=True, help="Print the events, one JSON object a line.")
@click.option("--quiet", is_flag=True, help="Only the answer: no summary on stderr.")
@click.option("--cancel-on-exit", is_flag=True, help="Ctrl-C cancels the job; without this it goes on.")
@with_sampling
def generate(
    settings: Settings, text: str, sampling: dict[str, Any], lane: Lane, raw: bool, system: str | None, **how: bool
) -> None:
    """Publish TEXT as one job to NATS and print the answer as it comes.

    TEXT "-" is read from standard input. Answers are greedy (temperature 0) unless an option says otherwise.
    The pipeline is the one that runs on the data folder, or whose NATS is named.
    """
    if text == "-":
        text = sys.stdin.read()
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out")
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt = {"prompt": text} if raw else {"messages": [*messages, {"role": "user", "content": text}]}
    job = make_job(sampling, **prompt)
    target = Target.of(settings, lane)
    try:
        asyncio.run(_print(target, job, **how))
    except asyncio.CancelledError:
        raise click.Abort from None


async def _print(target: Target, job: Job, *, as_json: bool, quiet: bool, cancel_on_exit: bool) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        loop.add_signal_handler(number, task.cancel)
    transcript = Transcript(io.StringIO() if as_json else sys.stdout, job.n)

    def say_that_nothing_comes() -> None:
        hint = f"no answer yet: job {job.id} waits in the queue of {target.model} (does a worker run?)"
        click.echo(hint, err=True)

    answer = ask(target, job, cancel_on_exit=cancel_on_exit, on_silence=say_that_nothing_comes)
    async with contextlib.aclosing(answer) as events:
        async for event in events:
            if as_json:
                click.echo(encode_events([event]))
            transcript.take(event)
    if not quiet and not as_json:
        click.echo(transcript.summary(), err=True)
