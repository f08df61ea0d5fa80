"""One trace a request, across the queue: every stage has its span, and the context rides in message headers."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.subjects import Lane
from schemas.wire import encode
from services import telemetry
from services.bus.publish import submit_job
from services.telemetry import spans
from tests.pipeline.conftest import Pipelines

STAGES = {
    "client", "prefill", "prefill.resolve", "prefill.restore", "prefill.compute", "prefill.store", "handoff",
    "decode", "decode.merge", "decode.generate",
}  # fmt: skip


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.use_tracer(provider.get_tracer("test"))
    yield exporter
    spans.use_tracer(None)
    provider.shutdown()


async def test_one_trace_from_the_client_to_the_last_token(pipelines: Pipelines, exporter: InMemorySpanExporter):
    async with pipelines() as pipeline:
        with telemetry.span("client"):
            trace = telemetry.trace_id()
            job = {"id": "traced", "prompt": "One, two,", "max_tokens": 3, "temperature": 0}
            await submit_job(
                pipeline.bus, "default", pipeline.text.slug, Lane.INTERACTIVE, encode(job), telemetry.inject()
            )
        await pipeline.read("traced")
    finished = [span for span in exporter.get_finished_spans() if span.context.trace_id == int(trace, 16)]
    assert {span.name for span in finished} == STAGES
    by_id = {span.context.span_id: span for span in finished}
    parents = {span.name: by_id[span.parent.span_id].name for span in finished if span.parent is not None}
    assert parents["prefill"] == "client" and parents["decode"] == "handoff"
    assert parents["decode.generate"] == "decode" and parents["prefill.compute"] == "prefill"
