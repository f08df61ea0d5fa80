"""Body of `/v1/stats`: a pipeline at a glance, for a page or a terminal. Each fact says how old it is."""

from typing import Literal

import msgspec

from schemas.beat import ProcessRole, ProcessState
from schemas.subjects import Lane, Stage

WorkerState = ProcessState | Literal["silent"]


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers. `reasons`: what is missing or worn in the whole pipeline."""

    process: str
    state: ProcessState
    reasons: list[str]
    models: list[str]
    open_requests: int
    uptime_s: float


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """One lane of a work queue. `build`: "" where one queue serves all; `taken` jobs are at a worker."""

    stage: Stage
    lane: Lane
    model: str
    build: str
    waiting: int
    taken: int


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """`age_s`: since the broker said so; None, and no lanes, before it ever did."""

    age_s: float | None
    lanes: list[LaneStats]
    dead_letters: int


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """`running` and `capacity` count sequences. `age_s`: since its last beat; a worker that says no more is `silent`
    for a while, then left out."""

    process: str
    role: ProcessRole
    state: WorkerState
    reasons: list[str]
    model: str
    build: str
    running: int
    capacity: int
    host: str
    pid: int
    uptime_s: float
    age_s: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of `count` latencies; None where there was none."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class WorkStats(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers did within `window_s`, as this gateway heard it; the rates are of the last `rate_window_s`.

    `prefix_asked_tokens` of prompts were looked up in the store, `prefix_hit_tokens` of them found. `age_s`: since the
    oldest beat that is counted; None while no worker beats.
    """

    age_s: float | None
    window_s: float
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    ttft: Spread
    itl: Spread
    rate_window_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: Unix seconds of this answer, by the broker's clock. `connected`: whether the broker is reached now."""

    v: int = 1
    at: float
    connected: bool
    gateway: GatewayStats
    queues: QueueStats
    workers: list[WorkerStats]
    work: WorkStats
