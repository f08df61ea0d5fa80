"""`kvrelay model`: the models of a data folder."""

import click

from services.cli.options import with_settings
from services.config import Settings


@click.group()
def model() -> None:
    """Fetch, list and show models."""


@model.command()
@click.argument("spec", required=False)
@with_settings("kv.data_dir")
def fetch(settings: Settings, spec: str | None) -> None:
    """Get a model and convert it, so that workers start at once.

    SPEC is `smollm2`, a GGUF file, a Hugging Face folder or a Hugging Face id; without it, compute.model.
    """
    from services.models import registry

    files = registry.resolve(spec or settings.compute.model, settings.kv.data_dir, progress=_say)
    _say(f"{files.name} is ready in {files.path}")


@model.command("list")
@with_settings("kv.data_dir")
def list_models(settings: Settings) -> None:
    """List the models that are ready in the data folder."""
    from services.models import registry

    for files in registry.cached(settings.kv.data_dir):
        click.echo(f"{files.slug}\t{files.name}\t{files.path}")


@model.command()
@click.argument("spec", required=False)
@with_settings("kv.data_dir")
def show(settings: Settings, spec: str | None) -> None:
    """Print what is known of a model, as JSON."""
    import msgspec

    from services.models import registry

    files = registry.resolve(spec or settings.compute.model, settings.kv.data_dir, progress=_say)
    plain = {name: getattr(files, name) for name in files.__struct_fields__ if name != "config"}
    shown = {name: value.hex() if isinstance(value, bytes) else value for name, value in plain.items()}
    click.echo(msgspec.json.format(msgspec.json.encode(shown, enc_hook=str)).decode())


def _say(line: str) -> None:
    click.echo(line, err=True)
