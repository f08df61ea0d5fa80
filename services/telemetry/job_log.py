"""The two log lines of a job: it started here, it ended here."""

import logging
from typing import Literal

from opentelemetry.context import Context

from services.telemetry.spans import trace_id

_log = logging.getLogger("kvrelay.job")


def job_log(
    event: Literal["job_started", "job_ended"],
    *,
    tenant: str,
    job: str,
    context: Context | None = None,
    **fields: str | int | float,
) -> None:
    """`context`: the job's trace (None: the current one). `job_ended` should say `code` and counts of tokens.

    Never give text of the prompt or the answer.
    """
    _log.info(event, extra={"fields": {"tenant": tenant, "job": job, **fields, "trace_id": trace_id(context)}})


def job_started(*, tenant: str, job: str, context: Context | None = None, **fields: str | int | float) -> None:
    job_log("job_started", tenant=tenant, job=job, context=context, **fields)


def job_ended(*, tenant: str, job: str, code: str, context: Context | None = None, **fields: str | int | float) -> None:
    """`code` is `ok` or an error code; it does not count the job, `metrics.jobs` does."""
    job_log("job_ended", tenant=tenant, job=job, context=context, code=code, **fields)
