"""`kvrelay restart`: the workers of `kvrelay up` are replaced by new ones."""

import sys
import time

import click

from schemas.errors import SetupError
from services.cli.options import with_settings
from services.config import Settings
from services.supervisor import runtime_file
from services.supervisor.runtime_file import RuntimeFile

LOOK_EVERY_S = 0.1


@click.command()
@with_settings("kv.data_dir")
@click.option(
    "--rolling", is_flag=True, help="Also when the new workers are of another build (weights, tokenizer, arithmetic)."
)
def restart(settings: Settings, rolling: bool) -> None:
    """Replace all workers of the pipeline that `kvrelay up` runs here, without losing or repeating a token.

    The configuration is read again. One prefill and one decode worker at a time are started beside the old ones, so
    there must be memory for two more; once they serve, the old ones hand their jobs on and leave. When the build
    changes, each job ends on the build that began it: give the old workers a grace (scheduler.grace_s) that is longer
    than the longest answer, or its job ends with build_gone. The gateway and NATS go on; what concerns them
    (api, bus, compute.model) needs a new `kvrelay up`.

    Exit code 0: all are replaced; 1: a new worker cannot serve, and the old ones go on.

    \b
    kvrelay restart
    kvrelay restart --rolling        # after `dtype = "float32"` was written into kvrelay.toml
    """
    before = _running(settings)
    if before.rollout.is_running:
        raise SetupError("a rolling restart is under way already")
    runtime_file.ask_for_rollout(settings.kv.data_dir, before, rolling=rolling)
    said, now = "", before
    while now.rollout.is_running or now.rollout.number == before.rollout.number:
        time.sleep(LOOK_EVERY_S)
        now = _running(settings)
        if now.rollout.step not in ("", said):
            said = now.rollout.step
            click.echo(said)
    if now.rollout.error:
        click.echo(f"kvrelay: not all workers were replaced: {now.rollout.error}", err=True)
        sys.exit(1)
    click.echo("all workers are replaced")


def _running(settings: Settings) -> RuntimeFile:
    found = runtime_file.read(settings.kv.data_dir)
    if found is None:
        raise SetupError(
            f"no pipeline runs on {settings.kv.data_dir}: name its folder with --data. Workers that something else "
            "keeps running are started again by that; `kvrelay drain` lets them leave"
        )
    return found
