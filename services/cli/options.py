"""Options that stand for settings: the command line is the last source of `services.config`."""

import functools
from collections.abc import Callable
from typing import Any

import click

from services import config

Command = Callable[..., Any]

_RELOADER = "kvrelay.reloader"

_OPTIONS: dict[str, tuple[str, str, Any]] = {
    "kv.data_dir": ("--data", "FOLDER", click.Path(file_okay=False)),
    "kv.redis_url": ("--redis", "URL", str),
    "compute.model": ("--model", "NAME", str),
    "compute.dtype": ("--dtype", "NAME", click.Choice(["auto", "int8", "bfloat16", "float32"])),
    "compute.threads": ("--threads", "N", int),
    "api.host": ("--host", "ADDRESS", str),
    "api.port": ("--port", "N", int),
    "api.keys_file": ("--keys", "FILE", click.Path(dir_okay=False)),
    "api.insecure": ("--insecure", "", bool),
    "bus.url": ("--nats", "URL", str),
    "bus.tenant": ("--tenant", "NAME", str),
}

rolling_option = click.option(
    "--rolling", is_flag=True, help="Start although workers of another build of the model serve: to change the build."
)


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Gives the command `settings`, from all sources; `names` are the keys that have an option of their own here."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(config_file: str | None, assigned: tuple[str, ...], **arguments: Any) -> Any:
            overrides = dict(map(_assignment, assigned))
            overrides |= {name: value for name in names if (value := arguments.pop(_variable(name))) is not None}
            read = functools.partial(config.load, config_file, overrides=overrides)
            click.get_current_context().meta[_RELOADER] = read
            return command(settings=read(), **arguments)

        for name in reversed(names):
            flag, metavar, kind = _OPTIONS[name]
            key = config.KEYS[name]
            text = f"{key.doc}  [{name}, default {key.default!r}]"
            # A flag says yes or nothing; nothing is None, so that other sources are heard.
            how: dict[str, Any] = (
                {"is_flag": True, "default": None} if kind is bool else {"metavar": metavar, "type": kind}
            )
            run = click.option(flag, _variable(name), help=text, **how)(run)
        run = click.option(
            "--set", "assigned", metavar="GROUP.KEY=VALUE", multiple=True, help="Any other setting; may be repeated."
        )(run)
        return click.option("--config", "config_file", metavar="FILE", help="TOML file  [default kvrelay.toml]")(run)

    return decorate


def reloader() -> Callable[[], config.Settings]:
    """Reads the settings of the command that runs once more, from the same sources."""
    read: Callable[[], config.Settings] = click.get_current_context().meta[_RELOADER]
    return read


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not GROUP.KEY=VALUE", param_hint="--set")
    return name.strip(), value.strip()
