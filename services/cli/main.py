"""The `kvrelay` command: finds the module of a command and turns our errors into exit codes.

Exit codes: 0 it went well; 1 the job or the command failed; 2 wrong usage, configuration or set-up; 130 interrupted.
"""

import sys
from importlib import import_module

import click

from schemas.errors import KvrelayError, SetupError
from services.cli.shadowed import warn_of_shadowed_packages

_COMMANDS = {
    "up": "services.cli.up:up",
    "worker": "services.cli.roles:worker",
    "prefill": "services.cli.roles:prefill",
    "decode": "services.cli.roles:decode",
    "gateway": "services.cli.roles:gateway",
    "workers": "services.cli.workers:workers",
    "drain": "services.cli.drain:drain",
    "restart": "services.cli.restart:restart",
    "generate": "services.cli.generate:generate",
    "chat": "services.cli.chat:chat",
    "batch": "services.cli.batch:batch",
    "job": "services.cli.job:job",
    "dead": "services.cli.dead:dead",
    "kv": "services.cli.kv:kv",
    "keys": "services.cli.keys:keys",
    "model": "services.cli.model:model",
    "config": "services.cli.show_config:config",
    "schemas": "services.cli.schemas:schemas",
    "doctor": "services.cli.doctor:doctor",
    "tune": "services.cli.tune:tune",
    "bench": "services.cli.bench:bench",
    "demo": "services.cli.demo:demo",
}

_EPILOG = """\b
Examples:
  kvrelay up                                 everything here: NATS, a prefill and a decode worker, HTTP
  kvrelay up --prefill 2 --decode 2 --port 0
  kvrelay up --both 1                        one worker for both stages
  kvrelay generate "Name the capital of France."
  kvrelay generate --raw --json --max-tokens 20 "Here is the English alphabet: ABC"
  kvrelay chat
  kvrelay batch run in.jsonl -o out.jsonl    a file of requests; goes on after Ctrl-C
  kvrelay job show hello-1                   what became of a job
  kvrelay dead ls                            jobs that were given up
  kvrelay kv explain "Hello"                 which blocks of a prompt are stored, and why not
  kvrelay prefill --nats nats://queue:4222   one worker for a NATS that runs elsewhere
  kvrelay keys add --tenant acme             a key for who may ask the gateway
  kvrelay workers                            who works, and on what
  kvrelay drain decode-4711-1f2e3d4c         let a worker leave; its jobs go on elsewhere
  kvrelay restart                            replace all workers, without a gap
  kvrelay tune                               measure the scheduler's settings here, and keep the best
  kvrelay config show                        every setting, and where it comes from
  kvrelay schemas job                        the JSON Schema of a job
  kvrelay doctor                             what is missing here, and how to get it
"""


class LazyGroup(click.Group):
    """Imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvrelay")
def cli() -> None:
    """Serve language models as a pipeline: prefill and decode workers, a durable queue, a verified KV store."""


def main() -> None:
    warn_of_shadowed_packages()
    try:
        code = cli.main(prog_name="kvrelay", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except SetupError as error:
        click.echo(f"kvrelay: {error.message}", err=True)
        code = 2
    except KvrelayError as error:
        click.echo(f"kvrelay: {error.code}: {error.message}", err=True)
        code = 1
    except BrokenPipeError:  # the reader of our output left, as in `kvrelay ... | head`
        sys.stderr.close()
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
