"""Notices when a foreign package hides one of ours: `kernels` is also the name of a Hugging Face package."""

import sys
from importlib.util import find_spec
from pathlib import Path

import click

OURS = ("schemas", "kernels", "kvstore", "services")
_HOME = Path(__file__).resolve().parents[2]


def shadowed_packages() -> list[tuple[str, str]]:
    """(package, where Python finds it instead) for each of ours that is not beside this file."""
    found = []
    for name in OURS:
        spec = find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ())] if spec else []
        if places[:1] != [_HOME / name]:
            found.append((name, str(places[0]) if places else "nowhere"))
    return found


def warn_of_shadowed_packages() -> None:
    for name, place in shadowed_packages():
        click.echo(
            f"kvrelay: the package `{name}` comes from {place} and not from {_HOME}: "
            "uninstall the foreign package, or give kvrelay an environment of its own",
            err=True,
        )
        sys.exit(2)
