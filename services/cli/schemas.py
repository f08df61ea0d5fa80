"""`kvrelay schemas`: what goes over NATS, and over HTTP, as documents for code generators and other people's tests."""

import json
from pathlib import Path
from typing import Any

import click

from schemas.asyncapi import documents


@click.command()
@click.argument("name", required=False)
@click.option("--write", "folder", type=click.Path(file_okay=False), help="Write those of NATS into a folder.")
def schemas(name: str | None, folder: str | None) -> None:
    """Print a schema: `asyncapi`, `openapi`, `job`, `event`, `beat` or `subjects`."""
    if folder is not None:
        for file, document in documents().items():
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / file).write_text(_spelled(document), encoding="utf-8")
        return
    known = {file.partition(".")[0]: document for file, document in documents().items()}
    if name == "openapi":
        from services.gateway.openapi import document as openapi

        known["openapi"] = openapi()
    if name not in known:
        raise click.UsageError(f"give one of openapi, {', '.join(known)}, or --write FOLDER")
    click.echo(_spelled(known[name]), nl=False)


def _spelled(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
