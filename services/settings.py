"""The groups of settings. Each key has a type, bounds, a default, a unit and the line that documents it in README."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from schemas.errors import SetupError

ENV_PREFIX = "KVRELAY_"


def key(doc: str, unit: str = "", **bounds: Any) -> Meta:
    """What the README's table says of a key, and the bounds that its value must keep."""
    return Meta(description=doc, extra={"unit": unit}, **bounds)


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, key("`smollm2`, a GGUF file, a Hugging Face folder or a Hugging Face id", min_length=1)] = (
        "smollm2"
    )
    dtype: Annotated[
        Literal["auto", "int8", "bfloat16", "float32"],
        key("arithmetic of weights, activations and KV; `auto`: `int8` for a GGUF of 4- and 8-bit weights, else "
            "`bfloat16`"),
    ] = "auto"  # fmt: skip
    prefill_dtype: Annotated[
        Literal["", "auto", "int8", "bfloat16", "float32"],
        key("arithmetic of prefill where it is another than decode's, `compute.dtype`; both make one build"),
    ] = ""
    threads: Annotated[int, key("compute threads of a worker; 0: one for each core it owns", "threads", ge=0)] = 0
    cores: Annotated[
        str, key("cores that a worker owns, like `0,2-3`; empty: `up` shares them out", pattern=r"^(\d+(-\d+)?(,|$))*$")
    ] = ""
    neighbours: Annotated[
        str,
        key("cores of other workers, used while these are idle; empty: `up` names those of its workers; `none`: none",
            pattern=r"^(none|(\d+(-\d+)?(,|$))*)$"),
    ] = ""  # fmt: skip


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chunk_tokens: Annotated[
        int, key("prompt tokens of one job in one pass; a multiple of `kv.block_tokens`", "tokens", ge=16)
    ] = 256
    token_budget: Annotated[int, key("prompt tokens of all jobs in one pass", "tokens", ge=16)] = 1024
    max_sequences: Annotated[int, key("sequences that a worker runs at once", "sequences", ge=1, le=1024)] = 16
    kv_memory_bytes: Annotated[
        int, key("memory for KV pages in each worker; 0: enough for `max_sequences`, within the machine", "bytes", ge=0)
    ] = 0
    speculate: Annotated[
        Literal["off", "lookup"],
        key("`lookup`: tokens that followed the last ones before are tried in one step; the answer stays the same"),
    ] = "lookup"
    max_proposals: Annotated[int, key("tokens of a sequence that a step tries beside the next one", "tokens", ge=1)] = 7
    grace_s: Annotated[
        float,
        key(
            "on SIGTERM or `kvrelay drain`, time in which jobs end or are handed back and the process exits",
            "s",
            ge=0.0,
            le=3600.0,
        ),
    ] = 10.0


class Kv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    data_dir: Annotated[str, key("folder of `nats/`, `kv/` and `models/`", min_length=1)] = ".kvrelay"
    block_tokens: Annotated[
        int, key("tokens of a KV block, a multiple of 16", "tokens", ge=16, le=1024, multiple_of=16)
    ] = 64
    codec: Annotated[
        Literal["none", "lz4", "zstd"], key("compression of stored blocks: byte planes and LZ4 or zstd, or none")
    ] = "lz4"
    quantisation: Annotated[
        Literal["none", "int8", "int4"], key("what K and V are rounded to, in memory and in the store: int8 is near "
        "lossless, int4 is not; changes the build")
    ] = "none"  # fmt: skip
    ttl_s: Annotated[float, key("life of a full block after its last use", "s", gt=0.0)] = 86_400.0
    partial_ttl_s: Annotated[float, key("life of a prompt's partial last block", "s", gt=0.0)] = 600.0
    max_bytes: Annotated[int, key("size of the store on disk", "bytes", ge=1_000_000)] = 10_000_000_000
    store_generated: Annotated[
        Literal["always", "conversation", "never"],
        key("blocks that decode makes are stored; `conversation`: those of chats, whose next turn starts from them"),
    ] = "always"
    fetch_budget_s: Annotated[
        float, key("longest that a request waits for stored blocks before it recomputes them", "s", ge=0.0)
    ] = 0.5
    redis_url: Annotated[
        str,
        key("Redis or Valkey that workers share blocks through: `redis://`, `rediss://`, `unix://`; `embedded`: `up` "
            "runs one; empty: none",
            pattern="^$|^embedded$|^(redis|rediss|unix)://"),
    ] = ""  # fmt: skip
    redis_cluster: Annotated[bool, key("`kv.redis_url` names a node of a Redis Cluster")] = False
    redis_timeout_s: Annotated[
        float, key("longest that one operation on Redis may take; then it is skipped until it answers again", "s",
                   gt=0.0, le=10.0)
    ] = 0.5  # fmt: skip
    redis_max_bytes: Annotated[int, key("memory of the embedded Valkey", "bytes", ge=16_000_000)] = 1_000_000_000


class Api(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, key("address that the gateway listens on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, key("port of the gateway; 0: any free one", ge=0, le=65535)] = 8080
    keys_file: Annotated[
        str, key("hashes of the keys that clients must have, see `kvrelay keys`; empty: anybody may ask")
    ] = ""
    insecure: Annotated[bool, key("listen beyond loopback without `api.keys_file`")] = False
    tls_cert_file: Annotated[str, key("certificate chain of the gateway, PEM; empty: plain HTTP")] = ""
    tls_key_file: Annotated[str, key("its private key, PEM")] = ""
    resume_grace_s: Annotated[float, key("how long a job outlives an HTTP client that went away", "s", ge=0.0)] = 5.0
    keepalive_s: Annotated[float, key("longest silence on a stream before a comment line is sent", "s", gt=0.0)] = 10.0
    max_body_bytes: Annotated[int, key("largest request body; below `bus.max_payload_bytes`", "bytes", ge=1024)] = (
        8_000_000
    )
    strict: Annotated[bool, key("refuse unknown request fields with 400 instead of ignoring them")] = False
    read_timeout_s: Annotated[
        float, key("longest that the head of a request may take, and a pause within its body; then 408", "s", gt=0.0)
    ] = 30.0
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
    url: Annotated[str, key("NATS servers, comma-separated, `tls://` for TLS; empty: `up` runs an embedded one")] = ""
    user: Annotated[str, key("user at NATS, if the URL names none")] = ""
    password_file: Annotated[str, key("file with the password of `bus.user`, read at each connect")] = ""
    creds_file: Annotated[str, key("`.creds` file of a NATS user (JWT and seed), read at each connect")] = ""
    nkey_file: Annotated[str, key("file with the seed of a NATS user's nkey (`SU...`), read at each connect")] = ""
    tls_ca_file: Annotated[str, key("CA that NATS servers are checked against, PEM; empty: the system's")] = ""
    tls_cert_file: Annotated[str, key("certificate that this process shows to NATS, PEM")] = ""
    tls_key_file: Annotated[str, key("its private key, PEM")] = ""
    tenant: Annotated[str, key("tenant that this process publishes for", pattern="^[a-z0-9-]{1,64}$")] = "default"
    ack_wait_s: Annotated[float, key("a claimed job without a sign of life goes to another worker", "s", ge=0.2)] = 3.0
    max_payload_bytes: Annotated[
        int, key("largest NATS message of the embedded server", "bytes", ge=65_536, le=67_108_864)
    ] = 8_388_608
    replies_max_age_s: Annotated[float, key("how long replies can be replayed", "s", ge=1.0)] = 7200.0
    replies_max_bytes: Annotated[int, key("size of the replies stream", "bytes", ge=1_000_000)] = 8_000_000_000
    files_max_bytes: Annotated[
        int, key("size of all uploaded files; more are refused with `storage_full`", "bytes", ge=1_000_000)
    ] = 4_000_000_000
    results_max_bytes: Annotated[
        int, key("size of all batches' results; a batch that has no room for more waits", "bytes", ge=1_000_000)
    ] = 8_000_000_000
    queue_max_messages: Annotated[
        int, key("jobs in a model's queue; more are refused with `queue_full`", "jobs", ge=1)
    ] = 1_000_000
    queue_max_bytes: Annotated[int, key("size of a model's queue", "bytes", ge=1_000_000)] = 4_000_000_000
    sync_interval: Annotated[
        str, key("when the embedded server writes to disk: `always`, or every so often, like `2s`",
                 pattern=r"^(always|\d+(ms|s|m))$"),
    ] = "always"  # fmt: skip
    replicas: Annotated[Literal[1, 3, 5], key("copies of each stream in a NATS cluster")] = 1


class Upstream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[
        str, key("OpenAI-compatible server that the gateway may send requests to, like `http://host:8000`; empty: none",
                 pattern=r"^$|^https?://[^/]")
    ] = ""  # fmt: skip
    api_key_file: Annotated[str, key("file with the key that it wants; clients' own keys are never sent there")] = ""
    model: Annotated[str, key("what it calls the model; empty: what the client calls it")] = ""
    share: Annotated[float, key("part of the requests that it answers", ge=0.0, le=1.0)] = 0.0
    mirror: Annotated[
        float,
        key("part of the requests that the other side answers, too, for a comparison in the log", ge=0.0, le=1.0),
    ] = 0.0
    fallback: Annotated[bool, key("it answers while a model has no workers here")] = False
    aliases: Annotated[
        str,
        key("names of models by weight, like `fast=smollm2-135m-instruct@9,upstream/gpt-x@1 big=upstream/gpt-y`"),
    ] = ""
    timeout_s: Annotated[float, key("longest silence of it before 504 `upstream_timeout`", "s", gt=0.0)] = 60.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compute: Compute = Compute()
    scheduler: Scheduler = Scheduler()
    kv: Kv = Kv()
    api: Api = Api()
    bus: Bus = Bus()
    upstream: Upstream = Upstream()


class Key(NamedTuple):
    """One row of the table: `name` is `<group>.<key>`."""

    name: str
    default: Any
    unit: str
    doc: str

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "_").upper()


def keys() -> Iterator[Key]:
    for group, kind in get_type_hints(Settings).items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            meta: Meta = get_args(hint)[1]
            unit = (meta.extra or {}).get("unit", "")
            yield Key(f"{group}.{name}", getattr(kind(), name), unit, meta.description or "")


KEYS: dict[str, Key] = {entry.name: entry for entry in keys()}


def parse_cores(text: str) -> list[int]:
    """Of compute.cores and its like: `"0,2-3"` -> [0, 2, 3]. Raises `SetupError`."""
    cores: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            cores += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise SetupError(f"compute.cores = {text!r} is not a list of cores like 0,2-3", param="compute.cores") from None
    return sorted(set(cores))


def value_of(settings: Settings, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(settings, group), field)
