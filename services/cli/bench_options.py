"""Options that several benches understand."""

import click

from schemas.errors import SetupError


def sizes_of(text: str, option: str) -> list[int]:
    """`1,4,8`. Raises `SetupError`."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise SetupError(f"{option} {text!r} is not a list of sizes like 1,4,8")
    return sizes


def by_peer(values: tuple[str, ...], peers: tuple[str, ...], option: str) -> dict[str, str]:
    """`peer=path`, or a path alone where there is one peer."""
    found = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals and len(peers) == 1:
            name, path = peers[0], value
        if name not in peers or not path:
            raise click.UsageError(f"{option} {value!r} is not PEER=PATH for one of {', '.join(peers) or '--peer'}")
        found[name] = path
    return found
