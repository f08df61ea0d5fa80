"""A pipeline for as long as a command needs one: the one that runs on the data folder, or one of its own."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import click
import msgspec

from schemas.errors import SetupError
from services.config import Settings, to_env
from services.supervisor import runtime_file
from services.supervisor.child import tethered

_STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def pipeline(settings: Settings, *arguments: str) -> Iterator[tuple[str, str]]:
    """(http url, nats url) of the pipeline that runs on the data folder, or of one that lives as long as the block.

    `arguments`: of `kvrelay up`, for the latter.
    """
    running = runtime_file.read(settings.kv.data_dir)
    if running is not None:
        click.echo(f"asking the pipeline that runs here already: {running.http} {running.nats}")
        yield running.http, running.nats
        return
    quiet = msgspec.structs.replace(
        settings.api,
        host="127.0.0.1",  # nobody else shall ask it, and so nobody needs a key
        port=0,
        keys_file="",
        tls_cert_file="",
        tls_key_file="",
        metrics_port=-1,
        log_level="warning",
    )
    command = [*tethered(), sys.executable, "-P", "-m", "services.cli.main", "up", *arguments]
    env = to_env(msgspec.structs.replace(settings, api=quiet))
    click.echo("starting a pipeline ...", err=True)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, encoding="utf-8") as up:
        try:
            assert up.stdout is not None
            words = up.stdout.readline().split()
            if len(words) != 3:
                raise SetupError("the pipeline did not start; the lines above say why")
            click.echo(" ".join(words))
            yield words[1], words[2]
        finally:
            up.terminate()
            code = up.wait(_STOP_TIMEOUT_S)
    if code != 0:
        raise click.ClickException(f"the pipeline did not stop in order: exit code {code}")
