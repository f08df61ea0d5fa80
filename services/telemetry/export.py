"""What a process shows of itself: logs always, a Prometheus endpoint unless it is off, OTLP if `OTEL_*` asks.

The SDK is imported only when something is exported. Each process calls `configure` once, before its other work.
"""

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from schemas.errors import SetupError
from services import config
from services.telemetry import logs, metrics, spans

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

_log = logging.getLogger("kvrelay")


class _Active:
    """What `configure` started. `closers` run in reverse."""

    def __init__(self, role: str, process: str) -> None:
        self.role, self.process = role, process
        self.endpoint = ""
        self.scrape: Callable[[], bytes] = bytes
        self.closers: list[Callable[[], object]] = []


_active: _Active | None = None


def configure(role: str, process: str, settings: config.Settings) -> None:
    """Starts logs, metrics and traces of this process; a second call changes nothing.

    Raises `SetupError` for an exporter that is not supported or a metrics port that is taken.
    """
    global _active
    if _active is not None:
        return
    otel = config.otel()
    _active = _Active(role, process)
    try:
        _start_logs(_active, settings.api)
        if otel.traces:
            _start_traces(_active, otel.traces)
        if otel.metrics or settings.api.metrics_port >= 0:
            _start_metrics(_active, settings.api, otel.metrics)
    except BaseException:
        shutdown()
        raise
    if _active.endpoint:
        _log.info("metrics", extra={"fields": {"url": _active.endpoint}})


def shutdown() -> None:
    """Sends what is buffered and stops every thread that `configure` started."""
    global _active
    active, _active = _active, None
    for close in reversed(active.closers if active else []):
        close()


def endpoint() -> str:
    """URL of this process's Prometheus endpoint, "" if there is none."""
    return _active.endpoint if _active else ""


def scrape() -> bytes:
    """What the Prometheus endpoint answers now; b"" if there is none."""
    return _active.scrape() if _active else b""


def _start_logs(active: _Active, api: config.Api) -> None:
    handler = logs.configure(active.role, active.process, spans.trace_id, api.log_format, api.log_level)
    active.closers.append(lambda: logging.getLogger().removeHandler(handler))


def _start_traces(active: _Active, exporter: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    made: SpanExporter
    if exporter == "console":
        made = ConsoleSpanExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        made = OTLPSpanExporter()
    provider = TracerProvider(resource=_resource(active))
    provider.add_span_processor(BatchSpanProcessor(made))
    spans.use_tracer(provider.get_tracer("kvrelay"))
    active.closers += [provider.shutdown, lambda: spans.use_tracer(None)]


def _start_metrics(active: _Active, api: config.Api, exporter: str) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    readers: list[MetricReader] = []
    if api.metrics_port >= 0:
        readers.append(_serve_prometheus(active, api))
    if exporter:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    provider = MeterProvider(metric_readers=readers, resource=_resource(active))
    metrics.bind(provider.get_meter("kvrelay"))
    active.closers += [provider.shutdown, metrics.unbind]


def _serve_prometheus(active: _Active, api: config.Api) -> "MetricReader":
    import prometheus_client
    from opentelemetry.exporter.prometheus import PrometheusMetricReader

    from services.telemetry.metrics_server import MetricsServer

    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server = MetricsServer(api.metrics_host, api.metrics_port, registry)
    except OSError as error:
        raise SetupError(
            f"api.metrics_port = {api.metrics_port} on {api.metrics_host} cannot be used: {error}; "
            "choose another, 0 for any free one, or -1 for none",
            param="api.metrics_port",
        ) from error
    active.closers.append(server.close)
    active.endpoint = f"http://{api.metrics_host}:{server.port}/metrics"
    active.scrape = lambda: prometheus_client.generate_latest(registry)
    return PrometheusMetricReader(registry=registry, scope_info_enabled=False)


def _resource(active: _Active) -> "Resource":
    """Who this is; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` have the last word on the service's name."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create()
    ours = {"service.instance.id": active.process, "kvrelay.role": active.role}
    if str(found.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        ours["service.name"] = f"kvrelay-{active.role}"
    return found.merge(Resource(ours))
