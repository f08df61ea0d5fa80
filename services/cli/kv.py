"""`kvrelay kv`: looks into the KV store of a data folder, and keeps it in order."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from schemas import wire
from services.cli import kv_page
from services.cli.durations import Duration
from services.cli.kv_explain import explain
from services.cli.kv_pin import pin, pins, unpin
from services.cli.kv_store import open_view
from services.cli.options import with_settings
from services.cli.progress import Progress
from services.config import Settings
from services.kv import listing
from services.kv.removal import collect, condemn, remove
from services.kv.totals import totals
from services.kv.verification import Damage
from services.kv.verification import verify as verify_blobs
from services.kv.view import ALL, Choice

_EXAMPLES = """\b
Examples:
  kvrelay kv stats                           how much lies there, by tenant, model and codec
  kvrelay kv ls --tenant acme --sort size --limit 20
  kvrelay kv explain "Name the capital of France."
  kvrelay kv pin --system "You are a careful clerk."
  kvrelay kv verify                          hash everything again; exit code 1 if something is damaged
  kvrelay kv rm --tenant acme
"""


@click.group(epilog=_EXAMPLES)
def kv() -> None:
    """Look into the KV store, keep prompts in it, and remove what should go.

    These are an operator's commands: they work on everybody's blocks, the files under kv.data_dir, and those in
    kv.redis_url if there is one. They need
    neither a running pipeline nor the model (explain and pin need its tokenizer), and may be used while workers serve.
    """


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_tenant = click.option("--tenant", default="", metavar="NAME", help="Only of this tenant  [default: of any]")
_model = click.option("--model", default="", metavar="SLUG", help="Only of this model  [default: of any]")
_unused = click.option(
    "--unused-for", "unused_s", type=Duration(), default=0.0, metavar="TIME", help="Only what was not used for 24h, say"
)


def _with_choice(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the command `choice`."""

    @functools.wraps(command)
    def run(tenant: str, model: str, unused_s: float, **arguments: Any) -> Any:
        return command(choice=Choice(tenant, model, unused_s), **arguments)

    for option in (_unused, _model, _tenant):
        run = option(run)
    return run


@kv.command(epilog="\b\nExamples:\n  kvrelay kv ls --unused-for 12h\n  kvrelay kv ls --tenant acme --json | jq .key")
@with_settings("kv.data_dir", "kv.redis_url")
@_with_choice
@click.option("--sort", type=click.Choice(list(listing.SORTS)), default="used", show_default=True)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Print so many at most.")
@_as_json
def ls(settings: Settings, choice: Choice, sort: str, limit: int | None, as_json: bool) -> None:
    """List stored blocks; with --json, one object a line.

    UNUSED is the time since the last use. A chain's later blocks count as used a little earlier than its first ones.
    """
    view = open_view(settings)
    with Progress("blocks seen") as progress:
        view.tick = progress.tick
        rows = listing.rows(view, view.held(choice), sort)
    if not as_json:
        click.echo(kv_page.HEAD)
    for row in rows[:limit]:
        click.echo(wire.encode(row) if as_json else kv_page.line(row))


@kv.command(epilog="\b\nExamples:\n  kvrelay kv show 9f86d081\n  kvrelay kv show --json 9f86d081884c7d65 | jq .header")
@click.argument("key")
@with_settings("kv.data_dir", "kv.redis_url")
@_as_json
def show(settings: Settings, key: str, as_json: bool) -> None:
    """Print all that is known of a block. KEY: enough first digits of its key to tell it from the others."""
    view = open_view(settings)
    with Progress("blocks seen") as progress:
        view.tick = progress.tick
        found = view.named(key)
    pinned = view.pinned()
    rows = [listing.row_of(view, held, pinned, whole=True) for held in found]
    click.echo(
        "\n".join(wire.encode(row).decode() for row in rows) if as_json else "\n\n".join(map(kv_page.page, rows))
    )


@kv.command(epilog="\b\nExamples:\n  kvrelay kv stats\n  kvrelay kv stats --json | jq .groups.tenant")
@with_settings("kv.data_dir", "kv.redis_url")
@_as_json
def stats(settings: Settings, as_json: bool) -> None:
    """Add up what is stored. RATIO: how many times larger the payload is than what is stored of it."""
    view = open_view(settings)
    with Progress("blocks seen") as progress:
        view.tick = progress.tick
        found = totals(view)
    click.echo(wire.encode(found) if as_json else kv_page.totals(found))


@kv.command(epilog="\b\nExamples:\n  kvrelay kv verify\n  kvrelay kv verify --tenant acme --keep --json")
@with_settings("kv.data_dir", "kv.redis_url")
@_with_choice
@click.option("--keep", is_flag=True, help="Leave damaged blocks where they are.")
@_as_json
def verify(settings: Settings, choice: Choice, keep: bool, as_json: bool) -> None:
    """Hash every stored block again; exit code 1 if one is damaged.

    Damaged blocks go to quarantine, where the newest 16 are kept. No request was ever answered from one: workers check
    each block when they read it, and compute it again.
    """
    view = open_view(settings)
    with Progress("blocks verified") as progress:
        view.tick = progress.tick

        def tell(damage: Damage) -> None:
            progress.clear()
            if not as_json:
                click.echo(f"{damage.key[: kv_page.KEY_DIGITS]}  {damage.tier}  tenant {damage.tenant}: {damage.why}")

        verdict = verify_blobs(view, choice, keep=keep, on_damage=tell)
    if as_json:
        click.echo(wire.encode(verdict))
    else:
        for name in verdict.damaged_pins:
            click.echo(f"pin {name}: its file is not as it was written; pin the text again")
        click.echo(f"{verdict.blocks:,} blocks, {verdict.bytes:,} bytes: {len(verdict.damaged)} damaged")
    if not verdict.is_sound:
        raise click.exceptions.Exit(1)


@kv.command(epilog="\b\nExamples:\n  kvrelay kv gc\n  kvrelay kv gc --json")
@with_settings("kv.data_dir", "kv.redis_url")
@_as_json
def gc(settings: Settings, as_json: bool) -> None:
    """Remove expired and quarantined blocks, and what dead writers left behind.

    Workers do the same as they go: this is for a store that nobody uses now. Pinned blocks stay.
    """
    view = open_view(settings)
    with Progress("blocks seen") as progress:
        view.tick = progress.tick
        found = collect(view)
    if as_json:
        click.echo(wire.encode(found))
    else:
        click.echo(
            f"removed {found.expired} expired and {found.quarantined} quarantined blocks ({found.bytes:,} bytes), "
            f"and {found.unfinished_files} unfinished files"
        )


@kv.command(epilog="\b\nExamples:\n  kvrelay kv rm 9f86d081\n  kvrelay kv rm --tenant acme --yes")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@with_settings("kv.data_dir", "kv.redis_url")
@_with_choice
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
def rm(settings: Settings, choice: Choice, keys: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove blocks: those named, or all of a tenant, of a model, or unused for some time.

    Requests that want them compute them again. Pinned blocks stay: unpin them first.
    """
    if bool(keys) == (choice != ALL):
        raise click.UsageError("name blocks by their KEYs, or say --tenant, --model or --unused-for")
    view = open_view(settings)
    with Progress("blocks seen") as progress:
        view.tick = progress.tick
        found = [held for key in keys for held in view.named(key)] if keys else view.held(choice)
        condemned = condemn(view, found)
    if condemned.blobs and not yes:
        _ask(len(condemned.blobs), sum(held.entry.size for held in condemned.blobs))
    removed = remove(condemned)
    if as_json:
        click.echo(wire.encode(removed))
    else:
        kept = f"; {removed.pinned_left} are pinned and stay: `kvrelay kv unpin` first" if removed.pinned_left else ""
        click.echo(f"removed {removed.blocks} blocks ({removed.bytes:,} bytes){kept}")


def _ask(num_blocks: int, num_bytes: int) -> None:
    try:
        agreed = click.confirm(f"remove {num_blocks} blocks ({num_bytes:,} bytes)?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("nothing was removed: say --yes where nobody can answer") from None
    if not agreed:
        raise click.ClickException("nothing was removed")


for _command in (explain, pin, unpin, pins):
    kv.add_command(_command)
