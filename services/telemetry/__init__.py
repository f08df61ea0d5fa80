"""Traces across the queue, metrics, logs. The only home of opentelemetry; use it as `from services import telemetry`.

Does not know what a job, a block or a queue is: callers say that in attributes.
"""

from services.telemetry.export import configure, endpoint, scrape, shutdown
from services.telemetry.job_log import job_ended, job_log, job_started
from services.telemetry.metrics import (
    damage,
    disagreements,
    failed_loads,
    forwarded,
    itl_s,
    jobs,
    meter,
    mirror_total_s,
    mirror_ttft_s,
    mirrored,
    pages_used,
    prefix_tokens_asked,
    prefix_tokens_hit,
    queue_depth,
    running,
    skipped_reads,
    skipped_writes,
    tier_open,
    tokens,
    ttft_s,
)
from services.telemetry.spans import extract, inject, now_s, record, span, trace_id, tracer

__all__ = [
    "configure",
    "damage",
    "disagreements",
    "endpoint",
    "extract",
    "failed_loads",
    "forwarded",
    "inject",
    "itl_s",
    "job_ended",
    "job_log",
    "job_started",
    "jobs",
    "meter",
    "mirror_total_s",
    "mirror_ttft_s",
    "mirrored",
    "now_s",
    "pages_used",
    "prefix_tokens_asked",
    "prefix_tokens_hit",
    "queue_depth",
    "record",
    "running",
    "scrape",
    "shutdown",
    "skipped_reads",
    "skipped_writes",
    "span",
    "tier_open",
    "tokens",
    "trace_id",
    "tracer",
    "ttft_s",
]
