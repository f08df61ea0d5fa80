"""Every setting: small frozen groups, read once from one TOML file, the environment and the command line.

Later sources win: default, what `kvrelay tune` kept, file, `KVRELAY_<GROUP>_<KEY>`, command line. An unknown key, a bad
value or a contradiction raises `SetupError` that names the key and where it came from. No other module reads the
environment.
"""

import difflib
import hashlib
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import quote

import msgspec

from schemas.errors import SetupError
from services import tuned
from services.settings import ENV_PREFIX, KEYS, Api, Bus, Compute, Key, Kv, Scheduler, Settings, value_of

__all__ = [
    "KEYS",
    "Api",
    "Bus",
    "Compute",
    "Key",
    "Kv",
    "Loaded",
    "Otel",
    "Scheduler",
    "Settings",
    "embedded_redis_socket",
    "library_switches",
    "load",
    "otel",
    "read",
    "redis_url",
    "to_env",
    "value_of",
]

CONFIG_FILE_ENV = "KVRELAY_CONFIG"
DEFAULT_FILE = "kvrelay.toml"
LOGIN_IN_URL = re.compile(r"(?<=://)[^@/\s]+(?=@)")
_MAX_SOCKET_PATH = 100  # 103 on macOS, 107 on Linux
DEFAULT = "default"
_SWITCHES = ("ATEN_", "DNNL_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")


class Loaded(NamedTuple):
    """`sources[name]` says where a value came from: `default`, a file, a variable or the command line."""

    settings: Settings
    sources: dict[str, str]


def load(
    path: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of this process; raises `SetupError`. See `read` for where they came from."""
    return read(path, env, overrides).settings


def read(
    path: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads all sources. `path` None: the file of `KVRELAY_CONFIG`, else `kvrelay.toml` if it is there.

    `overrides` maps `<group>.<key>` to what the command line said; None means that it said nothing.
    """
    groups: dict[str, dict[str, Any]] = {group: {} for group in Settings.__struct_fields__}
    sources = dict.fromkeys(KEYS, DEFAULT)
    for found in (*_from_file(path, env), *_from_env(env), *_from_command_line(overrides or {})):
        group, _, field = found.name.partition(".")
        groups[group][field] = _checked(found)
        sources[found.name] = found.source
    settings = msgspec.convert(groups, Settings)
    _refuse_contradictions(settings, sources)
    return _with_tuned(Loaded(settings, sources))


def _with_tuned(loaded: Loaded) -> Loaded:
    """What `kvrelay tune` chose stands in for defaults, unless it goes against what was said otherwise."""
    choice = tuned.choice_for(loaded.settings)
    if choice is None:
        return loaded
    groups = msgspec.to_builtins(loaded.settings)
    sources = dict(loaded.sources)
    for name, value in choice.values.items():
        if sources[name] == DEFAULT:
            group, _, field = name.partition(".")
            groups[group][field] = value
            sources[name] = str(tuned.path_of(loaded.settings.kv.data_dir))
    try:
        settings = msgspec.convert(groups, Settings)
        _refuse_contradictions(settings, sources)
    except (msgspec.ValidationError, SetupError):
        return loaded
    return Loaded(settings, sources)


def embedded_redis_socket(data_dir: str | Path) -> Path:
    """Where the embedded Valkey of a data folder listens. Systems allow short names only, so it may lie elsewhere."""
    socket = Path(data_dir).absolute() / "redis" / "valkey.sock"
    if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH:
        return socket
    digest = hashlib.sha256(os.fsencode(socket)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}-{digest}" / "valkey.sock"


def redis_url(kv: Kv) -> str:
    """`kv.redis_url` with `embedded` resolved; empty: there is no Redis."""
    if kv.redis_url == "embedded":
        return f"unix://{quote(str(embedded_redis_socket(kv.data_dir)))}"
    return kv.redis_url


class _Found(NamedTuple):
    """`unparsed`: a string stands for a value of any type, as in the environment; in a file it is a string."""

    name: str
    value: Any
    source: str
    unparsed: bool = True


def _from_file(path: str | Path | None, env: Mapping[str, str]) -> Iterator[_Found]:
    asked = path if path is not None else env.get(CONFIG_FILE_ENV, DEFAULT_FILE)
    if not str(asked):
        return
    file = Path(asked)
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path is None and CONFIG_FILE_ENV not in env:
            return
        raise SetupError(f"configuration file {file} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"configuration file {file} cannot be read: {error}") from error
    for group, entries in table.items():
        if group not in Settings.__struct_fields__:
            raise SetupError(f"unknown group [{group}] in {file}{_hint(group, Settings.__struct_fields__)}")
        if not isinstance(entries, dict):
            raise SetupError(f"{group} in {file} must be a table: write [{group}]")
        for name, value in entries.items():
            yield _Found(_known(f"{group}.{name}", str(file)), value, str(file), unparsed=False)


def _from_env(env: Mapping[str, str]) -> Iterator[_Found]:
    by_env = {entry.env: name for name, entry in KEYS.items()}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_FILE_ENV:
            continue
        if variable not in by_env:
            raise SetupError(f"unknown environment variable {variable}{_hint(variable, by_env)}")
        yield _Found(by_env[variable], value, f"environment {variable}")


def _from_command_line(overrides: Mapping[str, Any]) -> Iterator[_Found]:
    for name, value in overrides.items():
        if value is not None:
            yield _Found(_known(name, "the command line"), value, "command line")


def _known(name: str, where: str) -> str:
    if name not in KEYS:
        raise SetupError(f"unknown key {name} in {where}{_hint(name, KEYS)}", param=name)
    return name


def _hint(name: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; `kvrelay config table` lists all keys"


def _checked(found: _Found) -> Any:
    """The value as the type of its key."""
    group, _, field = found.name.partition(".")
    hint = get_type_hints(get_type_hints(Settings)[group], include_extras=True)[field]
    value, parse = _as_spelt_now(found), found.unparsed and isinstance(found.value, str)
    if parse and get_args(hint)[0] is bool:
        value = value.lower()
    try:
        checked = msgspec.convert(value, hint, strict=not parse)
    except msgspec.ValidationError as error:
        raise _bad_value(found, str(error)) from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise _bad_value(found, "must be finite")
    return checked


# What values of earlier versions mean now.
_SPELT_BEFORE = {"kv.store_generated": {"true": "always", "false": "never"}}


def _as_spelt_now(found: _Found) -> Any:
    return _SPELT_BEFORE.get(found.name, {}).get(str(found.value).lower(), found.value)


def _bad_value(found: _Found, why: str) -> SetupError:
    value = LOGIN_IN_URL.sub("***", repr(found.value))
    return SetupError(f"{found.name} = {value} (from {found.source}): {why}", param=found.name)


# (at fault, measured against, what must hold, in words)
_RULES: list[tuple[str, str, Callable[[Any, Any], bool], str]] = [
    ("scheduler.chunk_tokens", "kv.block_tokens", lambda a, b: a % b == 0, "must be a multiple of"),
    ("scheduler.token_budget", "scheduler.chunk_tokens", lambda a, b: a >= b, "must be at least"),
    ("kv.partial_ttl_s", "kv.ttl_s", lambda a, b: a <= b, "must be at most"),
    ("api.max_body_bytes", "bus.max_payload_bytes", lambda a, b: a < b, "must be below"),
    *(
        (f"upstream.{name}", "upstream.url", lambda a, b: not a or b != "", "needs the server of")
        for name in ("share", "mirror", "fallback")
    ),
    ("api.tls_cert_file", "api.tls_key_file", lambda a, b: bool(a) == bool(b), "goes together with"),
    ("bus.tls_cert_file", "bus.tls_key_file", lambda a, b: bool(a) == bool(b), "goes together with"),
    ("bus.user", "bus.password_file", lambda a, b: bool(a) == bool(b), "goes together with"),
    ("bus.replicas", "bus.url", lambda a, b: a == 1 or b != "", "needs a cluster, not the embedded server of"),
]


def _refuse_contradictions(settings: Settings, sources: Mapping[str, str]) -> None:
    for name, other, holds, words in _RULES:
        a, b = value_of(settings, name), value_of(settings, other)
        if not holds(a, b):
            raise SetupError(
                f"{name} = {a!r} (from {sources[name]}) {words} {other} = {b!r} (from {sources[other]})", param=name
            )


def to_env(settings: Settings, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child process that shall have the very same settings, whatever files say by then."""
    others = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    ours = {key.env: str(value_of(settings, name)) for name, key in KEYS.items()}
    return {**others, CONFIG_FILE_ENV: "", **ours}


class Otel(NamedTuple):
    """Exporters that the standard `OTEL_*` variables ask for: "otlp", "console" (traces only), or "" for none."""

    traces: str
    metrics: str


def otel(env: Mapping[str, str] = os.environ) -> Otel:
    """Raises `SetupError` for exporters that we do not have. Endpoints, headers etc. are read by the SDK itself."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Otel("", "")
    asked = Otel(_exporter(env, "TRACES", ("otlp", "console")), _exporter(env, "METRICS", ("otlp",)))
    protocol = env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if "otlp" in asked and protocol != "http/protobuf":
        raise SetupError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not supported: set http/protobuf")
    return asked


def library_switches(env: Mapping[str, str] = os.environ) -> list[bytes]:
    """What else in the environment decides how the libraries under us compute, as `NAME=value`."""
    return [f"{name}={value}".encode() for name, value in sorted(env.items()) if name.startswith(_SWITCHES)]


def _exporter(env: Mapping[str, str], signal: str, have: tuple[str, ...]) -> str:
    """The exporter of a signal; unset, it is OTLP if there is an endpoint to send to."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    variable = f"OTEL_{signal}_EXPORTER"
    name = env.get(variable) or ("otlp" if any(env.get(endpoint) for endpoint in endpoints) else "none")
    if name in ("none", "prometheus"):  # the Prometheus endpoint is ours: api.metrics_port
        return ""
    if name not in have:
        raise SetupError(f"{variable}={name} is not supported: set none or one of {', '.join(have)}")
    return name
