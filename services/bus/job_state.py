"""Tells the state of a job from what is stored: its events, who wrote them, and its message on the prefill queue.

What is not stored cannot be told: a hand-off that waits again after a decode worker gave it back still counts as
decoding, and blocks being rebuilt are seen once the worker that does it writes an event.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from schemas.events import Accepted, Done, Error, Event, Finish, Retry, Start, Token, is_end
from schemas.job_report import ChoiceReport, DeliveryReport, ErrorReport, JobReport
from schemas.state import JobState
from schemas.subjects import PREFILL_SUBJECTS, Stage, model_of_stream, parse_claim, parse_origin
from services.bus.clock import parse_timestamp
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.jetstream import NO_MESSAGE, STREAM_NOT_FOUND, Refused, call


class Stored(Protocol):
    """A message on a reply subject, as `services.bus.history` reads it."""

    @property
    def claim(self) -> str: ...
    @property
    def worker(self) -> str: ...
    @property
    def stored_at(self) -> float: ...
    @property
    def events(self) -> list[Event]: ...


def state_of(messages: Sequence[Stored], *, in_queue: bool) -> JobState:
    """`in_queue`: the job's message is still on the prefill queue, waiting or at work. It is looked at only where the
    last event is prefill's.
    """
    events = [event for message in messages for event in message.events]
    end = next((event for event in events if is_end(event)), None)
    if isinstance(end, Error):
        return JobState.CANCELLED if end.code == "cancelled" else JobState.FAILED
    if end is not None:
        return JobState.DONE
    if not events:
        return JobState.UNKNOWN
    match _last_stage(messages):
        case None:
            return JobState.QUEUED
        case Stage.DECODE:
            return JobState.DECODING
        case Stage.PREFILL if not in_queue:
            return JobState.HANDED_OFF
    return JobState.PREFILLING


async def look(bus: Bus, tenant: str, job: str) -> JobReport:
    """What is known of a job now. Raises `BusUnavailable`."""
    messages = await read_all(bus, tenant, job)
    origin = _origin(messages)
    model, in_queue = await _on_queue(bus, origin) if origin is not None else (None, True)
    if not in_queue and state_of(messages, in_queue=False) is JobState.HANDED_OFF:
        # Whatever prefill wrote before it settled is stored by now, perhaps the job's end.
        messages += await read_all(bus, tenant, job, after=messages[-1].sequence)
    return report_of(tenant, job, messages, in_queue=in_queue, model=model, now=bus.now())


def report_of(
    tenant: str, job: str, messages: Sequence[Stored], *, in_queue: bool, model: str | None, now: float
) -> JobReport:
    """`model` from the queue, where it is known. `now`: unix seconds by the broker."""
    state = state_of(messages, in_queue=in_queue)
    if state is JobState.UNKNOWN:
        return JobReport(id=job, tenant=tenant, state=state)
    events = [event for message in messages for event in message.events]
    start = next((event for event in events if isinstance(event, Start)), None)
    done = next((event for event in events if isinstance(event, Done)), None)
    error = next((event for event in events if isinstance(event, Error)), None)
    deliveries = _deliveries(messages)
    first_at, last_at = messages[0].stored_at, messages[-1].stored_at
    return JobReport(
        id=job,
        tenant=tenant,
        state=state,
        model=model or next((event.model for event in events if isinstance(event, Accepted)), None),
        build=start.build if start else None,
        prompt_tokens=start.prompt_tokens if start else None,
        cached_tokens=start.cached_tokens if start else None,
        choices=_choices(events),
        worker=deliveries[-1].worker or None if deliveries else None,
        hops=max((delivery.hop for delivery in deliveries), default=0),
        retries=sum(isinstance(event, Retry) for event in events),
        deliveries=deliveries,
        first_event_at=first_at,
        last_event_at=last_at,
        age_s=round((last_at if state.is_end else max(now, last_at)) - first_at, 3),
        timings=done.timings if done else {},
        error=ErrorReport(code=error.code, message=error.message, param=error.param) if error else None,
    )


def _last_stage(messages: Sequence[Stored]) -> Stage | None:
    claims = [parse_claim(message.claim) for message in reversed(messages)]
    return next((claim.stage for claim in claims if claim is not None), None)


def _choices(events: Iterable[Event]) -> list[ChoiceReport]:
    found: dict[int, ChoiceReport] = {}
    for event in events:
        if isinstance(event, Token):
            found[event.choice] = ChoiceReport(choice=event.choice, tokens=event.index + 1)
        elif isinstance(event, Finish):
            found[event.choice] = ChoiceReport(choice=event.choice, tokens=event.tokens, reason=event.reason)
    return [found[choice] for choice in sorted(found)]


def _deliveries(messages: Iterable[Stored]) -> list[DeliveryReport]:
    """In the order of their last events: the last one has the job, or had it."""
    found: dict[tuple[str, str], DeliveryReport] = {}
    for message in messages:
        claim = parse_claim(message.claim)
        if claim is None:
            continue
        key = (message.claim, message.worker)
        before = found.pop(key, None)
        found[key] = DeliveryReport(
            stage=claim.stage,
            hop=claim.hop,
            delivery=claim.delivery,
            worker=message.worker,
            tokens=(before.tokens if before else 0) + sum(isinstance(event, Token) for event in message.events),
            first_event_at=before.first_event_at if before else message.stored_at,
            last_event_at=message.stored_at,
        )
    return list(found.values())


def _origin(messages: Iterable[Stored]) -> tuple[int, int] | None:
    starts = [event for message in messages for event in message.events if isinstance(event, Start)]
    return parse_origin(starts[0].origin) if starts else None


async def _on_queue(bus: Bus, origin: tuple[int, int]) -> tuple[str | None, bool]:
    """(the model whose queue a job came from, whether its message is still there).

    The stream's creation tells it from another one of that name: sequences start anew in each.
    """
    sequence, created_ms = origin
    for stream in await _prefill_streams(bus):
        try:
            info = await call(bus, f"STREAM.INFO.{stream}")
            if int(parse_timestamp(info["created"]) * 1000) != created_ms:
                continue
            await call(bus, f"STREAM.MSG.GET.{stream}", {"seq": sequence})
        except Refused as error:
            if error.err_code == NO_MESSAGE:
                return model_of_stream(stream), False
            if error.err_code != STREAM_NOT_FOUND:
                raise
        else:
            return model_of_stream(stream), True
    return None, False


async def _prefill_streams(bus: Bus) -> list[str]:
    found: list[str] = []
    while True:
        page = await call(bus, "STREAM.NAMES", {"subject": PREFILL_SUBJECTS, "offset": len(found)})
        names = page.get("streams") or []
        found += names
        if not names or len(found) >= page["total"]:
            return found
