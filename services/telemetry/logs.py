"""Log lines on stderr, as text for people or as JSON for machines. Each line carries the trace id, if there is one.

Extra values of a line go in `extra={"fields": {...}}`. Prompts, answers and metadata are never logged.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Literal


class _Formatter(logging.Formatter):
    """Adds who speaks (`process`) and the trace to every line."""

    def __init__(self, role: str, process: str, trace_id: Callable[[], str]) -> None:
        super().__init__()
        self.role, self.process, self.trace_id = role, process, trace_id

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = dict(getattr(record, "fields", {}))
        trace = fields.pop("trace_id", None) or self.trace_id()
        return {**fields, "trace_id": trace} if trace else fields

    def failure(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class TextFormatter(_Formatter):
    """`2030-01-31T12:00:00.123 INFO prefill-3f2a job_started job=x tenant=default trace_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname} {self.process} {record.getMessage()}"
        pairs = [f"{name}={_text(value)}" for name, value in self.fields(record).items()]
        return "\n".join(filter(None, (" ".join([head, *pairs]), self.failure(record))))


class JsonFormatter(_Formatter):
    """One JSON object a line; `ts` is seconds since 1970."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "role": self.role,
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if failure := self.failure(record):
            line["exception"] = failure
        return json.dumps(line, default=str)


def _text(value: Any) -> str:
    """A value that cannot break its line: whatever holds spaces, quotes or control characters is quoted."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isascii() and text.isprintable() and not set(' "=') & set(text) else json.dumps(text)


def configure(
    role: str, process: str, trace_id: Callable[[], str], form: Literal["text", "json"], level: str
) -> logging.Handler:
    """Sends everything of level `level` and above to stderr; returns the handler that does."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if form == "json" else TextFormatter
    handler.setFormatter(formatter(role, process, trace_id))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Exporters that cannot reach their collector say so on every try: once is enough, the rest is in the backlog.
    logging.getLogger("opentelemetry").setLevel(max(logging.WARNING, root.level))
    return handler
