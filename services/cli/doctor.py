"""`kvrelay doctor`: says what is missing on this machine and how to get it."""

import sys
from typing import Any

import click

from schemas.errors import SetupError
from services import config
from services.cli.checks import Finding, all_findings


@click.command()
@click.option("--config", "config_file", metavar="FILE", help="TOML file  [default kvrelay.toml]")
@click.option("--data", metavar="FOLDER", help=config.KEYS["kv.data_dir"].doc)
@click.option("--port", type=int, metavar="N", help=config.KEYS["api.port"].doc)
def doctor(config_file: str | None, **options: Any) -> None:
    """Say what is missing here and how to get it. Exits 1 if something must be mended."""
    overrides = {"kv.data_dir": options["data"], "api.port": options["port"]}
    findings: list[Finding] = []
    try:
        settings = config.load(config_file, overrides=overrides)
        findings.append(Finding("ok", "settings", "consistent"))
    except SetupError as error:
        settings = config.load("", env={}, overrides=overrides)
        findings.append(Finding("missing", "settings", error.message, "the rest is checked with the defaults"))
    findings += all_findings(settings)
    for finding in findings:
        click.echo(f"{finding.verdict:8}{finding.what:14}{finding.found}")
        if finding.verdict != "ok" and finding.remedy:
            click.echo(f"{'':22}-> {finding.remedy}")
    broken = sum(finding.verdict == "missing" for finding in findings)
    click.echo(f"{broken} to mend" if broken else "ready: try `kvrelay up`")
    sys.exit(1 if broken else 0)
