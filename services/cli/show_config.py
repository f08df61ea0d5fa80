"""`kvrelay config`: what the settings are, whether they are right, and the table of all keys."""

from pathlib import Path

import click

from services import config as sources
from services.cli import config_table
from services.cli.options import with_settings
from services.config import Settings


@click.group()
def config() -> None:
    """Show, check and list settings."""


@config.command()
@click.option("--config", "config_file", metavar="FILE", help="TOML file  [default kvrelay.toml]")
@click.option("--changed", is_flag=True, help="Only what is not a default.")
def show(config_file: str | None, changed: bool) -> None:
    """Print every setting as TOML, and where it comes from."""
    loaded = sources.read(config_file)
    click.echo(config_table.toml(loaded, changed_only=changed))


@config.command()
@with_settings()
def check(settings: Settings) -> None:
    """Exit 0 if the settings are right; name what is wrong and exit 2 otherwise."""
    click.echo("ok")


@config.command()
@click.option("--update", "readme", type=click.Path(exists=True, dir_okay=False), help="Rewrite the table in a file.")
def table(readme: str | None) -> None:
    """Print the table of all keys, as in the README."""
    if readme is None:
        click.echo(config_table.markdown(), nl=False)
        return
    page = Path(readme)
    page.write_text(config_table.updated(page.read_text(encoding="utf-8")), encoding="utf-8")
