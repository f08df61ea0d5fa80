"""A job that this gateway has accepted and that has not ended."""

from dataclasses import dataclass

from schemas.errors import DeadlineExceeded
from schemas.events import Error, Event, Start, Token, is_end
from schemas.job import MAX_TIMEOUT_S, Job
from services.gateway.inbox import Inbox


@dataclass
class OpenJob:
    """Times are the event loop's clock, in seconds. `number` is the job's prompt within its request."""

    id: str
    model: str
    number: int
    inbox: Inbox
    accepted_s: float
    deadline_s: float
    first_token_deadline_s: float | None
    build: str = ""
    has_token: bool = False
    has_ended: bool = False
    code: str = "ok"  # of the end, once it has
    is_ending: bool = False  # we are writing its end

    @classmethod
    def of(cls, job: Job, number: int, inbox: Inbox, now_s: float) -> "OpenJob":
        assert job.id is not None and job.model is not None
        ttft_s = job.ttft_timeout_s
        return cls(
            id=job.id,
            model=job.model,
            number=number,
            inbox=inbox,
            accepted_s=now_s,
            deadline_s=now_s + (job.timeout_s or MAX_TIMEOUT_S),
            first_token_deadline_s=None if ttft_s is None else now_s + ttft_s,
        )

    def note(self, event: Event) -> None:
        if isinstance(event, Token):
            self.has_token = True
        elif isinstance(event, Start):
            self.build = event.build
        elif is_end(event):
            self.has_ended = True
            self.code = event.code if isinstance(event, Error) else "ok"

    def overdue(self, now_s: float) -> DeadlineExceeded | None:
        if now_s >= self.deadline_s:
            return DeadlineExceeded("the request did not end in time (timeout_s)")
        waits = self.first_token_deadline_s is not None and not self.has_token
        if waits and now_s >= (self.first_token_deadline_s or 0.0):
            return DeadlineExceeded("the request had no token in time (ttft_timeout_s)")
        return None
