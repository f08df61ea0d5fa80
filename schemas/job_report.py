"""What is told of a job: the body of `GET /v1/requests/{id}` and of `kvrelay job show --json`."""

import msgspec

from schemas.events import FinishReason
from schemas.state import JobState
from schemas.subjects import Stage


class ChoiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is None until the choice is finished."""

    choice: int
    tokens: int
    reason: FinishReason | None = None


class DeliveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that wrote events. Times are unix seconds by the broker."""

    stage: Stage
    hop: int
    delivery: int
    worker: str
    tokens: int
    first_event_at: float
    last_event_at: float


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is None or empty is not known (yet).

    `worker` has the job, or had it last. `hops` counts its hand-offs as far as events tell of them. `retries` counts
    the runs alone after a delivery that died. `age_s` counts from the first event to the end, or to now. `timings` are
    seconds, from `done`.
    """

    id: str
    tenant: str
    state: JobState
    model: str | None = None
    build: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    choices: list[ChoiceReport] = []
    worker: str | None = None
    hops: int = 0
    retries: int = 0
    deliveries: list[DeliveryReport] = []
    first_event_at: float | None = None
    last_event_at: float | None = None
    age_s: float | None = None
    timings: dict[str, float] = {}
    error: ErrorReport | None = None


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request with several prompts: a job each, in their order. `state` is the whole request's."""

    id: str
    state: JobState
    jobs: list[JobReport]


_LEAST_FIRST = [
    JobState.QUEUED,
    JobState.PREFILLING,
    JobState.HANDED_OFF,
    JobState.DECODING,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.DONE,
]


def joined(name: str, jobs: list[JobReport]) -> RequestReport:
    """A request goes on while one of its jobs does, and went well if all of them did."""
    return RequestReport(id=name, state=min((job.state for job in jobs), key=_LEAST_FIRST.index), jobs=jobs)
