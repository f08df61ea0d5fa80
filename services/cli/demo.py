"""`kvrelay demo`: the main job, end to end, and a verdict.

A pipeline is started on the data folder (or asked, if one runs there) and gets three questions: over NATS, over HTTP,
and a second turn, whose prompt must be found in the store for more than one block.
"""

import asyncio
import contextlib
import sys
from typing import Any

import click

from services.cli.ask import Target, ask
from services.cli.borrowed_pipeline import pipeline
from services.cli.http_stream import StreamedAnswer, stream_chat
from services.cli.options import with_settings
from services.cli.pipeline_address import served_slug
from services.cli.sampling_options import make_job
from services.cli.transcript import Transcript
from services.config import Settings

_FRANCE = "Name the capital of France."
_FRANCE_ANSWER = "The capital of France is Paris."
_CLERK = (
    "You are a careful clerk at a small public library in the town of Ashford. Answer every question in one short "
    "sentence. The library opens at nine in the morning and closes at six in the evening. Members may borrow five "
    "books for three weeks. Late books cost ten pence a day."
)
_SHELF = " Shelf {number} is on floor {floor} and holds books about local history, gardens, rivers and old maps."
_MAX_CHARS_PER_TOKEN = 6  # English has four or five


@click.command()
@with_settings("kv.data_dir", "compute.model", "compute.dtype", "bus.url")
def demo(settings: Settings) -> None:
    """Start a pipeline, ask it three questions, and say whether everything worked."""
    with pipeline(settings) as (http_url, nats_url):
        model = served_slug(settings)
        failures = [
            *asyncio.run(_over_nats(Target(nats_url, settings.bus.tenant, model, bus=settings.bus), settings)),
            *_over_http(http_url, model, settings.kv.block_tokens),
        ]
    if failures:
        raise click.ClickException("; ".join(failures))
    click.echo("\nall three answered, and the second turn started from the store")


async def _over_nats(target: Target, settings: Settings) -> list[str]:
    """What went wrong, if anything."""
    _say_question("over NATS", _FRANCE)
    transcript = Transcript(sys.stdout)
    job = make_job({"temperature": 0.0, "max_tokens": 64}, messages=[{"role": "user", "content": _FRANCE}])
    async with contextlib.aclosing(ask(target, job)) as events:
        async for event in events:
            transcript.take(event)
    click.echo(f"({transcript.summary()})")
    if settings.compute.model == "smollm2" and transcript.text != _FRANCE_ANSWER:
        return [f"over NATS, {_FRANCE_ANSWER!r} was expected and {transcript.text!r} came"]
    return [] if transcript.text else ["over NATS, no text came"]


def _over_http(http_url: str, model: str, block_tokens: int) -> list[str]:
    """Two turns of one conversation; what went wrong, if anything."""
    said = [_message("system", _long_system_message(block_tokens)), _message("user", "When does the library open?")]
    first = _ask_http("over HTTP", http_url, model, said)
    said += [_message("assistant", first.text), _message("user", "And when does it close?")]
    second = _ask_http("a second turn over HTTP", http_url, model, said)
    failures = [
        f"{name} turn over HTTP: no text came" for name, turn in (("first", first), ("second", second)) if not turn.text
    ]
    if second.cached_tokens < 2 * block_tokens:
        failures.append(
            f"the second turn found {second.cached_tokens} tokens of its prompt in the store, "
            f"and should have found {2 * block_tokens} or more"
        )
    return failures


def _ask_http(how: str, http_url: str, model: str, messages: list[dict[str, str]]) -> StreamedAnswer:
    _say_question(how, messages[-1]["content"])
    answer = StreamedAnswer()
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}
    for text in stream_chat(http_url, body, answer):
        click.echo(text, nl=False)
    click.echo(f"\n({answer.summary()})")
    return answer


def _long_system_message(block_tokens: int) -> str:
    """At least two and a half blocks."""
    text, number = _CLERK, 0
    while len(text) < 2.5 * block_tokens * _MAX_CHARS_PER_TOKEN:
        number += 1
        text += _SHELF.format(number=number, floor=1 + number % 3)
    return text


def _say_question(how: str, question: str) -> None:
    click.echo(f"\n{how}: {question}")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
