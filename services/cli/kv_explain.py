"""`kvrelay kv explain`: why a prompt is in the store, or why it is not."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from schemas import wire
from schemas.errors import InvalidRequest, KvrelayError
from schemas.job import Job
from services.cli import kv_page
from services.cli.options import with_settings
from services.cli.progress import Progress
from services.cli.sampling_options import make_job
from services.config import Settings

_EXAMPLES = """\b
Examples:
  kvrelay kv explain "Name the capital of France."
  kvrelay kv explain --system "You are a careful clerk." "When does the library open?" --tenant acme
  kvrelay kv explain --messages chat.json --json | jq '.blocks[] | [.block, .state]'
  kvrelay kv explain --raw "Once upon a time"
"""


def _with_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the command `job`, whose prompt is asked about."""

    @functools.wraps(command)
    def run(text: str | None, system: str | None, messages_file: str | None, raw: bool, **arguments: Any) -> Any:
        return command(job=_job(text, system, messages_file, raw), **arguments)

    run = click.option("--raw", is_flag=True, help="PROMPT is the prompt itself: no chat template.")(run)
    file = click.Path(exists=True, dir_okay=False)
    file_help = "Instead of PROMPT: a JSON list of messages, or a whole request with one."
    run = click.option("--messages", "messages_file", type=file, metavar="FILE", help=file_help)(run)
    run = click.option("--system", metavar="TEXT", help="System message before it.")(run)
    return click.argument("text", metavar="[PROMPT]", required=False)(run)


@click.command(epilog=_EXAMPLES)
@with_settings("kv.data_dir", "kv.redis_url", "compute.model", "compute.dtype", "bus.tenant")
@_with_job
@click.option("--salt", default="", metavar="TEXT", help="The request's cache_salt.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with a list of blocks.")
def explain(settings: Settings, job: Job, salt: str, as_json: bool) -> None:
    """Say of each block of a prompt which tier holds it, or why none does.

    PROMPT is tokenised as the server would, as a user's message. A block is missing because it was never stored, was
    evicted, has expired, was damaged or erased; or it is there for somebody else: another model, tokenizer, dtype,
    quantisation, block size or arithmetic, another tenant, another salt. To tell, this looks at the blocks of all
    tenants: it is for operators, and its output for nobody else. Exit code 0 whatever it finds.
    """
    from services.cli.kv_store import open_view
    from services.kv.explain import Explainer, Question
    from services.kv.who import Who, identity_of, other_texts
    from services.text.prompt import resolve_prompt

    view = open_view(settings)
    who = Who.of(settings, _say)
    known = identity_of(settings, who.files, view.identities)
    others = other_texts(settings.kv.data_dir, who.files)

    def tokens_for(tokenizer_hash: bytes) -> list[int] | None:
        try:
            return resolve_prompt(job, others[tokenizer_hash]) if tokenizer_hash in others else None
        except KvrelayError:
            return None  # it cannot be said to that model

    question = Question(known, settings.bus.tenant, salt, resolve_prompt(job, who.text), tokens_for)
    with Progress("blocks explained") as progress:
        view.tick = progress.tick
        found = Explainer(view, question).explain()
    if as_json:
        click.echo(wire.encode(found))
    else:
        click.echo("\n".join(kv_page.explanation(found)))


def _job(text: str | None, system: str | None, messages_file: str | None, raw: bool) -> Job:
    if (text is None) == (messages_file is None):
        raise click.UsageError("give a PROMPT or --messages FILE")
    if raw and (system is not None or messages_file is not None):
        raise click.UsageError("--raw leaves out the chat template, which --system and --messages need")
    if raw:
        return make_job({}, prompt=text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    if messages_file is None:
        return make_job({}, messages=[*messages, {"role": "user", "content": text}])
    return make_job({}, messages=[*messages, *_messages_in(Path(messages_file))])


def _messages_in(file: Path) -> list[object]:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} is no JSON: {error}", param="messages") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise InvalidRequest(f"{file} holds no list of messages", param="messages")
    return messages


def _say(line: str) -> None:
    click.echo(line, err=True)
