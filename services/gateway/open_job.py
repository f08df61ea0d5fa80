"""A job that this gateway's clients wait for, and that has not ended."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.asked import Asked
from schemas.errors import DeadlineExceeded, KvrelayError
from schemas.events import Error, Event, Start, Token, is_end
from schemas.job import MAX_TIMEOUT_S
from services.gateway.inbox import Inbox


class Seat(NamedTuple):
    """Where a request gets the events of one of its jobs; takes them for `watch` while it can."""

    job: "OpenJob"
    number: int
    inbox: Inbox

    @property
    def has_room(self) -> bool:
        return self.inbox.has_room

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.job.note(event)
        self.inbox.take(self.number, events)


@dataclass(eq=False)
class OpenJob:
    """Times are the event loop's clock, in seconds. `inboxes` are those of the requests that wait for it.

    `can_be_resumed`: a client that lost its answer knows how to come back for it. `is_ours`: this gateway accepted it.
    `is_detached`: it goes on whether or not anybody waits for it here.
    """

    tenant: str
    id: str
    model: str
    deadline_s: float
    first_token_deadline_s: float | None
    can_be_resumed: bool = False
    is_detached: bool = False
    is_ours: bool = True
    inboxes: set[Inbox] = field(default_factory=set)
    build: str = ""
    has_token: bool = False
    has_ended: bool = False
    code: str = "ok"  # of the end, once it has
    is_ending: bool = False  # we are writing its end
    leaving: asyncio.Task[None] | None = None  # nobody waits, and soon it will be ended for that
    is_asking: bool = False  # whether somebody waits elsewhere

    @classmethod
    def of(cls, tenant: str, id_: str, model: str, asked: Asked, accepted_s: float) -> "OpenJob":
        ttft_s = asked.ttft_timeout_s
        return cls(
            tenant=tenant,
            id=id_,
            model=model,
            deadline_s=accepted_s + (asked.timeout_s or MAX_TIMEOUT_S),
            first_token_deadline_s=None if ttft_s is None else accepted_s + ttft_s,
            is_detached=asked.detached,
        )

    @property
    def is_watched(self) -> bool:
        """Whether a client waits here, or may still come back."""
        return bool(self.inboxes) or (self.leaving is not None and not self.is_asking)

    def stop(self, error: KvrelayError) -> None:
        """Tells all who wait that nothing more comes."""
        for inbox in self.inboxes:
            inbox.stop(error)

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
