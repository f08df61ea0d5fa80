"""`kvrelay kv pin`, `unpin` and `pins`: system prompts that stay in the store."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from schemas import wire
from schemas.errors import InvalidRequest
from schemas.subjects import check_slug
from services.cli.options import with_settings
from services.cli.printable import on_one_line
from services.cli.progress import Progress
from services.config import Settings
from services.supervisor import runtime_file

if TYPE_CHECKING:
    from services.kv.pinning import Pin, PinReport, Wanted

_LOOK_S = 0.2
_TEXT_CHARS = 48
_LINE = "{id:12}  {tenant:16}  {model:24}  {kind:6}  {tokens:>6}  {stored:>9}  {text}"

_EXAMPLES = """\b
Examples:
  kvrelay kv pin --system "You are a careful clerk at a small public library ..."
  kvrelay kv pin --file clerk.txt --tenant acme
  kvrelay kv pin --file clerk.txt --shared       every tenant's chats that begin so use these blocks
  kvrelay kv pin --prompt "Once upon a time ..."  the beginning of raw prompts
"""


class _Given(NamedTuple):
    """What the command line says of the text, and for whom."""

    system: str | None
    file: str | None
    prompt: str | None
    salt: str
    shared: bool


def _with_text(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the command `given`."""

    @functools.wraps(command)
    def run(**arguments: Any) -> Any:
        return command(given=_Given(*(arguments.pop(name) for name in _Given._fields)), **arguments)

    shared = "For all tenants. The text is then no secret: who asks with it can tell that it is stored."
    run = click.option("--shared", is_flag=True, help=shared)(run)
    run = click.option("--salt", default="", metavar="TEXT", help="For requests with this cache_salt.")(run)
    run = click.option("--prompt", metavar="TEXT", help="The beginning of raw prompts.")(run)
    file = click.Path(exists=True, dir_okay=False)
    run = click.option("--file", type=file, metavar="FILE", help="A system message, from a file.")(run)
    return click.option("--system", metavar="TEXT", help="A system message: its rendered turn is pinned.")(run)


@click.command(epilog=_EXAMPLES)
@with_settings("kv.data_dir", "kv.redis_url", "compute.model", "bus.url", "bus.tenant")
@_with_text
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS",
              help="Wait so long for its blocks.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def pin(settings: Settings, given: _Given, wait_s: float, as_json: bool) -> None:
    """Compute the blocks of a text that many prompts begin with, and keep them.

    Its full blocks are computed by a worker of the pipeline that uses this store, in the batch lane, and are neither
    evicted nor do they expire. Workers of a later build find the pin when they start, and compute its blocks again.
    Without a pipeline the pin waits for one. A pin is one tenant's, unless it is --shared.
    """
    wanted = _wanted(settings, given)
    from services.kv.pinning import make_pin
    from services.kv.who import Who

    who = Who.of(settings, lambda line: click.echo(line, err=True))
    made = make_pin(settings, who, wanted)
    is_served = bool(settings.bus.url) or runtime_file.read(settings.kv.data_dir) is not None
    found = _await(settings, made, who.files.tokenizer_hash, wait_s if is_served else 0.0)
    if as_json:
        click.echo(wire.encode(found))
        return
    click.echo(f"{found.id}: {found.tokens} tokens pinned, {found.stored} of {found.blocks or '?'} blocks stored")
    if not is_served:
        click.echo("no pipeline runs on this data folder: the blocks are computed once `kvrelay up` does", err=True)
    elif found.stored < found.blocks or not found.blocks:
        click.echo("the workers compute the rest when they have time: `kvrelay kv pins` tells", err=True)


@click.command(epilog="\b\nExamples:\n  kvrelay kv unpin 3f8a01c2d4e5\n  kvrelay kv unpin --all --tenant acme")
@click.argument("pin_ids", nargs=-1, metavar="[PIN]...")
@with_settings("kv.data_dir", "kv.redis_url")
@click.option("--all", "all_pins", is_flag=True, help="All pins, or all of --tenant.")
@click.option("--tenant", default="", metavar="NAME", help="With --all: only of this tenant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a pin.")
def unpin(settings: Settings, pin_ids: tuple[str, ...], all_pins: bool, tenant: str, as_json: bool) -> None:
    """Remove pins. Their blocks stay for as long as any other does."""
    if bool(pin_ids) == all_pins or (tenant and not all_pins):
        raise click.UsageError("name pins, as `kvrelay kv pins` lists them, or say --all")
    from services.cli.kv_store import open_view
    from services.kv.pinning import unpin as remove

    view = open_view(settings)
    if all_pins:
        pin_ids = tuple(p.id for p in view.pins.pins() if tenant in ("", p.tenant))
    remove(view, list(pin_ids), settings.kv.ttl_s)
    for pin_id in pin_ids:
        click.echo(wire.encode({"id": pin_id, "unpinned": True}) if as_json else f"{pin_id}: unpinned")


@click.command(epilog="\b\nExamples:\n  kvrelay kv pins\n  kvrelay kv pins --json | jq .text")
@with_settings("kv.data_dir", "kv.redis_url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a pin.")
def pins(settings: Settings, as_json: bool) -> None:
    """List what is pinned. STORED: how many of its blocks are there for the newest build of its model."""
    from services.cli.kv_store import open_view
    from services.kv.pinning import report

    view = open_view(settings)
    if not as_json:
        click.echo(_LINE.format(id="PIN", tenant="TENANT", model="MODEL", kind="KIND", tokens="TOKENS",
                                stored="STORED", text="TEXT"))  # fmt: skip
    for found in [report(view, pin) for pin in view.pins.pins()]:
        click.echo(wire.encode(found) if as_json else _line(found))
    for name in view.pins.damaged():
        click.echo(f"{name}: damaged, and does not count: unpin it, and pin the text again", err=True)


def _line(found: "PinReport") -> str:
    text = on_one_line(found.text)
    return _LINE.format(
        id=found.id,
        tenant=found.tenant,
        model=found.model,
        kind=found.kind,
        tokens=found.tokens or "?",
        stored=f"{found.stored}/{found.blocks or '?'}",
        text=text if len(text) <= _TEXT_CHARS else text[: _TEXT_CHARS - 3] + "...",
    )


def _wanted(settings: Settings, given: _Given) -> "Wanted":
    from services.kv.pinning import Wanted

    texts = [given.system, _text_of(Path(given.file)) if given.file is not None else None, given.prompt]
    named = [text for text in texts if text is not None]
    if len(named) != 1:
        raise click.UsageError("give one of --system, --file and --prompt")
    if given.shared and given.salt:
        raise click.UsageError("--shared is for requests of any salt")
    kind: Literal["system", "prompt"] = "system" if given.prompt is None else "prompt"
    return Wanted(kind, named[0], check_slug(settings.bus.tenant, "tenant"), given.salt, given.shared)


def _text_of(file: Path) -> str:
    """As it is in the file, but for a line end at its end, which editors add."""
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8 text: {error}") from error


def _await(settings: Settings, pin: "Pin", tokenizer_hash: bytes, wait_s: float) -> "PinReport":
    """What there is of the pin once all of it is, or the time is up."""
    from services.cli.kv_store import open_view
    from services.kv.pinning import report

    view = open_view(settings)
    until_s = time.monotonic() + wait_s
    with Progress("looks") as progress:
        while True:
            found = report(view, pin, tokenizer_hash)
            progress.say(f"{found.stored} of {found.blocks or '?'} blocks stored")
            if 0 < found.blocks <= found.stored or time.monotonic() >= until_s:
                return found
            time.sleep(_LOOK_S)
