"""Every setting: small frozen groups, read once from one TOML file, the environment and the command line.

Later sources win: default, file, `KVRELAY_<GROUP>_<KEY>`, command line. An unknown key, a bad value or a
contradiction raises `SetupError` that names the key and where it came from. No other module reads the environment.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from schemas.errors import SetupError

ENV_PREFIX = "KVRELAY_"
CONFIG_FILE_ENV = "KVRELAY_CONFIG"
DEFAULT_FILE = "kvrelay.toml"
DEFAULT = "default"


def key(doc: str, unit: str = "", **bounds: Any) -> Meta:
    """What the README's table says of a key, and the bounds that its value must keep."""
    return Meta(description=doc, extra={"unit": unit}, **bounds)


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, key("`smollm2`, a GGUF file, a Hugging Face folder or a Hugging Face id", min_length=1)] = (
        "smollm2"
    )
    dtype: Annotated[Literal["bfloat16", "float32"], key("arithmetic of weights, activations and KV")] = "bfloat16"
    threads: Annotated[int, key("compute threads of a worker; 0: one for each core it owns", "threads", ge=0)] = 0
    cores: Annotated[
        str, key("cores that a worker owns, like `0,2-3`; empty: `up` shares them out", pattern=r"^(\d+(-\d+)?(,|$))*$")
    ] = ""


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chunk_tokens: Annotated[
        int, key("prompt tokens of one job in one pass; a multiple of `kv.block_tokens`", "tokens", ge=16)
    ] = 256
    token_budget: Annotated[int, key("prompt tokens of all jobs in one pass", "tokens", ge=16)] = 1024
    max_sequences: Annotated[int, key("sequences that a worker runs at once", "sequences", ge=1, le=1024)] = 16
    kv_memory_bytes: Annotated[
        int, key("memory for KV pages in each worker; 0: enough for `max_sequences`, within the machine", "bytes", ge=0)
    ] = 0
    grace_s: Annotated[
        float, key("on SIGTERM, time to finish running jobs before they are handed back", "s", ge=0.0, le=3600.0)
    ] = 10.0


class Kv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    data_dir: Annotated[str, key("folder of `nats/`, `kv/` and `models/`", min_length=1)] = ".kvrelay"
    block_tokens: Annotated[
        int, key("tokens of a KV block, a multiple of 16", "tokens", ge=16, le=1024, multiple_of=16)
    ] = 64
    codec: Annotated[Literal["none", "lz4"], key("compression of stored blocks: byte planes and LZ4, or none")] = "lz4"
    ttl_s: Annotated[float, key("life of a full block after its last use", "s", gt=0.0)] = 86_400.0
    partial_ttl_s: Annotated[float, key("life of a prompt's partial last block", "s", gt=0.0)] = 600.0
    max_bytes: Annotated[int, key("size of the store on disk", "bytes", ge=1_000_000)] = 10_000_000_000
    store_generated: Annotated[
        bool, key("also store blocks that decode makes: the next turn of a conversation starts from them")
    ] = True
    fetch_budget_s: Annotated[
        float, key("longest that a request waits for stored blocks before it recomputes them", "s", ge=0.0)
    ] = 0.5


class Api(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, key("address that the gateway listens on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, key("port of the gateway; 0: any free one", ge=0, le=65535)] = 8080
    resume_grace_s: Annotated[float, key("how long a job outlives an HTTP client that went away", "s", ge=0.0)] = 5.0
    keepalive_s: Annotated[float, key("longest silence on a stream before a comment line is sent", "s", gt=0.0)] = 10.0
    max_body_bytes: Annotated[int, key("largest request body; below `bus.max_payload_bytes`", "bytes", ge=1024)] = (
        8_000_000
    )
    strict: Annotated[bool, key("refuse unknown request fields with 400 instead of ignoring them")] = False
    write_timeout_s: Annotated[float, key("a client that reads nothing for so long is cut off", "s", gt=0.0)] = 30.0
    stream_buffer_bytes: Annotated[int, key("unread events held for one slow client", "bytes", ge=4096)] = 1_048_576
    no_worker_timeout_s: Annotated[
        float, key("wait for a worker of the model before 503 `no_worker`; 0: answer at once", "s", ge=0.0)
    ] = 0.0
    metrics_host: Annotated[str, key("address of each process's Prometheus endpoint", min_length=1)] = "127.0.0.1"
    metrics_port: Annotated[
        int,
        key("port of the Prometheus endpoint; 0: any free one, told in log and beat; -1: off; `up` counts up from it",
            ge=-1, le=65535),
    ] = 0  # fmt: skip
    log_format: Annotated[Literal["text", "json"], key("form of the log lines on stderr")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], key("least level that is logged")] = "info"


class Bus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[str, key("NATS servers, comma-separated; empty: `up` runs an embedded one")] = ""
    tenant: Annotated[str, key("tenant that this process publishes for", pattern="^[a-z0-9-]{1,64}$")] = "default"
    ack_wait_s: Annotated[float, key("a claimed job without a sign of life goes to another worker", "s", ge=0.2)] = 3.0
    max_payload_bytes: Annotated[
        int, key("largest NATS message of the embedded server", "bytes", ge=65_536, le=67_108_864)
    ] = 8_388_608
    replies_max_age_s: Annotated[float, key("how long replies can be replayed", "s", ge=1.0)] = 7200.0
    replies_max_bytes: Annotated[int, key("size of the replies stream", "bytes", ge=1_000_000)] = 8_000_000_000
    queue_max_messages: Annotated[
        int, key("jobs in a model's queue; more are refused with `queue_full`", "jobs", ge=1)
    ] = 1_000_000
    queue_max_bytes: Annotated[int, key("size of a model's queue", "bytes", ge=1_000_000)] = 4_000_000_000
    sync_interval: Annotated[
        str, key("when the embedded server writes to disk: `always`, or every so often, like `2s`",
                 pattern=r"^(always|\d+(ms|s|m))$"),
    ] = "always"  # fmt: skip
    replicas: Annotated[Literal[1, 3, 5], key("copies of each stream in a NATS cluster")] = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compute: Compute = Compute()
    scheduler: Scheduler = Scheduler()
    kv: Kv = Kv()
    api: Api = Api()
    bus: Bus = Bus()


class Key(NamedTuple):
    """One row of the table: `name` is `<group>.<key>`."""

    name: str
    default: Any
    unit: str
    doc: str

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "_").upper()


class Loaded(NamedTuple):
    """`sources[name]` says where a value came from: `default`, a file, a variable or the command line."""

    settings: Settings
    sources: dict[str, str]


def keys() -> Iterator[Key]:
    for group, kind in get_type_hints(Settings).items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            meta: Meta = get_args(hint)[1]
            unit = (meta.extra or {}).get("unit", "")
            yield Key(f"{group}.{name}", getattr(kind(), name), unit, meta.description or "")


KEYS: dict[str, Key] = {entry.name: entry for entry in keys()}


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
    for name, value, source in (*_from_file(path, env), *_from_env(env), *_from_command_line(overrides or {})):
        group, _, field = name.partition(".")
        groups[group][field] = _checked(name, value, source)
        sources[name] = source
    settings = msgspec.convert(groups, Settings)
    _refuse_contradictions(settings, sources)
    return Loaded(settings, sources)


Found = tuple[str, Any, str]  # key, raw value, source


def _from_file(path: str | Path | None, env: Mapping[str, str]) -> Iterator[Found]:
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
            yield _known(f"{group}.{name}", str(file)), value, str(file)


def _from_env(env: Mapping[str, str]) -> Iterator[Found]:
    by_env = {entry.env: name for name, entry in KEYS.items()}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_FILE_ENV:
            continue
        if variable not in by_env:
            raise SetupError(f"unknown environment variable {variable}{_hint(variable, by_env)}")
        yield by_env[variable], value, f"environment {variable}"


def _from_command_line(overrides: Mapping[str, Any]) -> Iterator[Found]:
    for name, value in overrides.items():
        if value is not None:
            yield _known(name, "the command line"), value, "command line"


def _known(name: str, where: str) -> str:
    if name not in KEYS:
        raise SetupError(f"unknown key {name} in {where}{_hint(name, KEYS)}", param=name)
    return name


def _hint(name: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; `kvrelay config table` lists all keys"


def _checked(name: str, value: Any, source: str) -> Any:
    """`value` as the type of `name`; text from the environment or the command line is parsed."""
    group, _, field = name.partition(".")
    hint = get_type_hints(get_type_hints(Settings)[group], include_extras=True)[field]
    if get_args(hint)[0] is bool and isinstance(value, str):
        value = value.lower()
    try:
        parsed = msgspec.convert(value, hint, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise SetupError(f"{name} = {value!r} (from {source}): {error}", param=name) from error
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise SetupError(f"{name} = {value!r} (from {source}): must be finite", param=name)
    return parsed


# (at fault, measured against, what must hold, in words)
_RULES: list[tuple[str, str, Callable[[Any, Any], bool], str]] = [
    ("scheduler.chunk_tokens", "kv.block_tokens", lambda a, b: a % b == 0, "must be a multiple of"),
    ("scheduler.token_budget", "scheduler.chunk_tokens", lambda a, b: a >= b, "must be at least"),
    ("kv.partial_ttl_s", "kv.ttl_s", lambda a, b: a <= b, "must be at most"),
    ("api.max_body_bytes", "bus.max_payload_bytes", lambda a, b: a < b, "must be below"),
    ("bus.replicas", "bus.url", lambda a, b: a == 1 or b != "", "needs a cluster, not the embedded server of"),
]


def _refuse_contradictions(settings: Settings, sources: Mapping[str, str]) -> None:
    for name, other, holds, words in _RULES:
        a, b = value_of(settings, name), value_of(settings, other)
        if not holds(a, b):
            raise SetupError(
                f"{name} = {a!r} (from {sources[name]}) {words} {other} = {b!r} (from {sources[other]})", param=name
            )


def value_of(settings: Settings, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(settings, group), field)


def to_env(settings: Settings) -> dict[str, str]:
    """`settings` as environment variables: a child that gets these, and no others of ours, loads the same."""
    values = {entry.env: str(value_of(settings, name)) for name, entry in KEYS.items()}
    return {CONFIG_FILE_ENV: "", **values}
