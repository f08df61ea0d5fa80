"""`kvrelay keys`: who may ask the gateway."""

from pathlib import Path

import click

from schemas.errors import SetupError
from services.cli.options import with_settings
from services.config import Settings
from services.gateway import key_file

_HEADINGS = ("ID", "TENANT", "CREATED", "REVOKED", "NAME")


@click.group()
def keys() -> None:
    """Make, list and revoke the API keys in api.keys_file; gateways that run notice at once."""


@keys.command()
@with_settings("api.keys_file", "bus.tenant")
@click.option("--name", default="", metavar="TEXT", help="A note for people: whose it is.")
def add(settings: Settings, name: str) -> None:
    """Make a key for a tenant and print it, once: only its hash is kept.

    \b
    kvrelay keys add --keys keys.json --tenant acme --name "acme's web shop"
    """
    click.echo(key_file.add(_file(settings), settings.bus.tenant, name))


@keys.command()
@with_settings("api.keys_file")
def ls(settings: Settings) -> None:
    """List the keys by their ids."""
    rows = [(key.id, key.tenant, key.created, key.revoked or "-", key.name) for key in key_file.read(_file(settings))]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
@with_settings("api.keys_file")
@click.argument("key_id", metavar="ID")
def revoke(settings: Settings, key_id: str) -> None:
    """Refuse a key from now on; answers that run are finished. ID as `ls` shows it."""
    revoked = key_file.revoke(_file(settings), key_id)
    click.echo(f"revoked {revoked.id} of {revoked.tenant}", err=True)


def _file(settings: Settings) -> Path:
    if not settings.api.keys_file:
        raise SetupError("api.keys_file is empty: name the file with --keys FILE", param="api.keys_file")
    return Path(settings.api.keys_file)
