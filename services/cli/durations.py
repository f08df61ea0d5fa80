"""Spans of time on the command line: `90s`, `15m`, `24h`, `7d`."""

import re

import click

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if parts is None:
            self.fail(f"{value!r} is no span of time like 90s, 15m, 24h or 7d", param, ctx)
        return float(parts[1]) * _UNITS_S[parts[2]]


def shown(seconds: float) -> str:
    """In the largest unit that leaves at least two: `47 h`."""
    for unit in ("d", "h", "m"):
        if abs(seconds) >= 2 * _UNITS_S[unit]:
            return f"{seconds / _UNITS_S[unit]:.0f} {'min' if unit == 'm' else unit}"
    return f"{seconds:.0f} s"
