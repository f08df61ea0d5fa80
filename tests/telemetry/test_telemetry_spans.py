"""Context crosses the queue, and trace ids exist whether or not anybody exports spans."""

import re
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services import telemetry
from services.telemetry import spans


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    spans.use_tracer(provider.get_tracer("test"))
    yield memory
    spans.use_tracer(None)
    provider.shutdown()


def test_outside_of_any_span_there_is_nothing_to_pass_on() -> None:
    assert telemetry.inject() == {}
    assert telemetry.trace_id() == ""


def test_a_trace_crosses_a_queue_although_nothing_is_exported() -> None:
    with telemetry.span("publish"):
        headers = telemetry.inject()
        here = telemetry.trace_id()
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
    with telemetry.span("prefill", telemetry.extract(headers)):
        assert telemetry.trace_id() == here
        with telemetry.span("inner"):
            assert telemetry.trace_id() == here
        assert telemetry.inject()["traceparent"] == headers["traceparent"]
    assert telemetry.trace_id() == ""


def test_two_traces_are_two() -> None:
    with telemetry.span("a"):
        first = telemetry.trace_id()
    with telemetry.span("b"):
        assert telemetry.trace_id() != first


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-00"}])
def test_a_message_without_a_usable_context_starts_a_trace(headers: dict[str, str] | None) -> None:
    context = telemetry.extract(headers)
    assert telemetry.trace_id(context) == ""
    with telemetry.span("prefill", context):
        assert telemetry.trace_id()


def test_header_names_come_in_any_case() -> None:
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert telemetry.trace_id(telemetry.extract({"Traceparent": parent})) == "ab" * 16


def test_a_message_in_a_span_has_its_own_context_and_not_the_current_one() -> None:
    with telemetry.span("the worker's own"):
        assert telemetry.trace_id(telemetry.extract({})) == ""


def test_exported_spans_hang_together_across_the_queue(exported: InMemorySpanExporter) -> None:
    with telemetry.span("publish", tenant="default"):
        headers = telemetry.inject()
    context = telemetry.extract(headers)
    with pytest.raises(ValueError), telemetry.span("prefill", context):
        raise ValueError("broken")
    telemetry.record("decode.steps", context, 10.0, 12.5, tokens=3)
    publish, prefill, steps = exported.get_finished_spans()
    assert publish.attributes == {"tenant": "default"}
    assert prefill.parent is not None and steps.parent is not None
    assert {span.context.trace_id for span in (publish, prefill, steps)} == {publish.context.trace_id}
    assert prefill.parent.span_id == steps.parent.span_id == publish.context.span_id
    assert [event.name for event in prefill.events] == ["exception"]
    assert (steps.start_time, steps.end_time) == (10_000_000_000, 12_500_000_000)


def test_the_trace_id_of_an_exported_span_is_the_logged_one(exported: InMemorySpanExporter) -> None:
    with telemetry.span("job"):
        logged = telemetry.trace_id()
    assert int(logged, 16) == exported.get_finished_spans()[0].context.trace_id
