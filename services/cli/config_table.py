"""Settings as text: the README's table, and TOML with sources."""

import json
from typing import Any

from schemas.errors import SetupError
from services.config import KEYS, LOGIN_IN_URL, Loaded, value_of

BEGIN = "<!-- config table: `make readme` writes it -->"
END = "<!-- end of config table -->"


def markdown() -> str:
    rows = ["| key | default | unit | meaning |", "|---|---|---|---|"]
    rows += [f"| `{key.name}` | `{literal(key.default)}` | {key.unit} | {key.doc} |" for key in KEYS.values()]
    return "\n".join(rows) + "\n"


def updated(page: str) -> str:
    """`page` with its table brought up to date. Raises `SetupError` if it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SetupError(f"no place for the table: put the lines {BEGIN} and {END} where it belongs")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


def toml(loaded: Loaded, *, changed_only: bool = False) -> str:
    """All settings as a `kvrelay.toml`, each with its source; credentials in URLs are hidden."""
    lines: list[str] = []
    group = ""
    for name, source in loaded.sources.items():
        if changed_only and source == "default":
            continue
        if group != name.partition(".")[0]:
            group = name.partition(".")[0]
            lines += ["", f"[{group}]"]
        value = LOGIN_IN_URL.sub("***", literal(value_of(loaded.settings, name)))
        lines.append(f"{name.partition('.')[2]} = {value}  # {source}")
    return "\n".join(lines).strip()


def literal(value: Any) -> str:
    """`value` as TOML writes it. JSON strings are TOML strings; large integers get underscores."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 100_000:
        return f"{value:_}"
    return json.dumps(value, ensure_ascii=False)
