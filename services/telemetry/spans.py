"""Spans, and their context in message headers (W3C traceparent).

Where nothing exports spans they cost a few microseconds and record nothing, but still make and pass on trace ids,
since log lines are found by them.
"""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | bool | int | float

_W3C_HEADERS = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()
_noop = trace.NoOpTracer()
_ids = random.Random()
_exporting: Tracer | None = None


def use_tracer(exporting: Tracer | None) -> None:
    """None: from now on nothing is exported."""
    global _exporting
    _exporting = exporting


def tracer() -> Tracer:
    return _exporting or _noop


@contextmanager
def span(name: str, parent: Context | None = None, **attributes: Attribute) -> Iterator[Span]:
    """The current span while the block runs; `parent` None: below the current one, or a new trace.

    Errors that leave the block are recorded on it.
    """
    if _exporting is not None:
        with _exporting.start_as_current_span(name, parent, attributes=attributes) as recording:
            yield recording
        return
    silent = NonRecordingSpan(_trace_of(parent))
    token = otel_context.attach(trace.set_span_in_context(silent, parent))
    try:
        yield silent
    finally:
        otel_context.detach(token)


def record(name: str, parent: Context | None, start_s: float, end_s: float, **attributes: Attribute) -> None:
    """A span of work that was mixed with other jobs' work, once it is over. Seconds of `time.time()`."""
    if _exporting is not None:
        made = _exporting.start_span(name, parent, attributes=attributes, start_time=int(start_s * 1e9))
        made.end(int(end_s * 1e9))


def _trace_of(parent: Context | None) -> SpanContext:
    """The span context that `parent` (None: the current context) carries, or that of a new trace."""
    found = trace.get_current_span(parent).get_span_context()
    if found.is_valid:
        return found
    sampled = TraceFlags(TraceFlags.SAMPLED)  # a process further on may export
    return SpanContext(_ids.getrandbits(128) | 1, _ids.getrandbits(64) | 1, is_remote=False, trace_flags=sampled)


def inject(context: Context | None = None) -> dict[str, str]:
    """Headers that carry `context` (None: the current one) in a message; empty outside of any span."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context)
    return headers


def extract(headers: Mapping[str, str] | None) -> Context:
    """The context that came with a message; empty if there is none or it is malformed. Names in any case."""
    lower = {name.lower(): value for name, value in (headers or {}).items()}
    return _propagator.extract({name: lower[name] for name in _W3C_HEADERS if name in lower}, Context())


def trace_id(context: Context | None = None) -> str:
    """32 hex digits, "" outside of any trace."""
    found = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(found.trace_id) if found.is_valid else ""


def now_s() -> float:
    """The clock of `record`."""
    return time.time()
