"""What `kvrelay job show` prints of a job."""

from collections.abc import Iterator

from schemas.job_report import ChoiceReport, DeliveryReport, JobReport
from services.cli.printable import on_one_line

_WIDTH = 12


def page(report: JobReport) -> str:
    """A line a fact; what is not known is left out."""
    return "\n".join(f"{name:{_WIDTH}}{text}" for name, text in _facts(report))


def _facts(report: JobReport) -> Iterator[tuple[str, str]]:
    yield "job", f"{report.id} of tenant {report.tenant}"
    yield "state", report.state
    if report.model is not None:
        yield "model", report.model
    if report.build is not None:
        yield "build", report.build
    if report.prompt_tokens is not None:
        yield "prompt", f"{report.prompt_tokens} tokens, {report.cached_tokens} of them cached"
    if report.choices:
        yield "answer", "; ".join(map(_choice, report.choices))
    if report.worker is not None:
        yield "worker", report.worker
    if report.deliveries:
        yield "hops", f"{report.hops}" + (f", run alone {report.retries} times" if report.retries else "")
    for number, delivery in enumerate(report.deliveries):
        yield "" if number else "deliveries", _delivery(delivery)
    if report.age_s is not None:
        yield "took" if report.state.is_end else "age", f"{report.age_s:.3f} s since its first event"
    if report.timings:
        yield "timings", ", ".join(f"{name} {value:.3f}" for name, value in report.timings.items())
    if report.error is not None:
        yield "error", f"{report.error.code}: {on_one_line(report.error.message)}"


def _choice(choice: ChoiceReport) -> str:
    return f"{choice.tokens} tokens" + (f" ({choice.reason})" if choice.reason else "")


def _delivery(delivery: DeliveryReport) -> str:
    lasted_s = delivery.last_event_at - delivery.first_event_at
    return (
        f"{delivery.stage}, hop {delivery.hop}, delivery {delivery.delivery}, by {delivery.worker or 'nobody named'}: "
        f"{delivery.tokens} tokens, events over {lasted_s:.3f} s"
    )
