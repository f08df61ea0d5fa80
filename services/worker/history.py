"""What a job's reply subject already tells: the work of earlier deliveries, read back before going on."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from schemas.events import Accepted, End, Error, Event, Finish, Retry, Start, Token, is_end
from schemas.subjects import Stage


class Stored(Protocol):
    """A message on a reply subject, as `services.bus.history` reads it."""

    @property
    def sequence(self) -> int: ...
    @property
    def claim(self) -> str: ...
    @property
    def worker(self) -> str: ...
    @property
    def events(self) -> list[Event]: ...


@dataclass
class History:
    """`last` is the stream sequence of the last message, 0 when there is none; `writers` of a choice are the claims
    under which its tokens were written.

    `num_lone_runs` speak against the job, unless the last of them, under `lone_claim` by `lone_worker`, has an alibi.
    """

    last: int = 0
    start: Start | None = None
    end: End | None = None
    tokens: dict[int, list[Token]] = field(default_factory=dict)
    writers: dict[int, list[str]] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    num_lone_runs: int = 0
    lone_claim: str = ""
    lone_worker: str = ""
    _last_writer: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Stored]) -> "History":
        history = cls()
        for message in messages:
            history.last = message.sequence
            for event in message.events:
                history._add(event, message.claim)
                if isinstance(event, Retry):
                    history.lone_claim, history.lone_worker = message.claim, message.worker
            if any(not isinstance(event, (Retry, Accepted)) for event in message.events):
                stage_and_hop, _, delivery = message.claim.rpartition(".")
                if delivery.isdigit():
                    history._last_writer[stage_and_hop] = int(delivery)
        return history

    @property
    def origin(self) -> str | None:
        """The queue message that the reply subject belongs to; None if no event says so."""
        if self.start is not None:
            return self.start.origin
        return self.end.origin if isinstance(self.end, Error) else None

    def num_fruitless(self, stage: Stage, hop: int, num_delivered: int) -> int:
        """Deliveries of this queue message that came before this one and after the last that made an event."""
        return num_delivered - 1 - self._last_writer.get(f"{stage}.{hop}", 0)

    def _add(self, event: Event, claim: str) -> None:
        if isinstance(event, Retry):
            self.num_lone_runs = event.attempt
            return
        self.num_lone_runs = 0
        if isinstance(event, Start):
            self.start = event
        elif isinstance(event, Token):
            self.tokens.setdefault(event.choice, []).append(event)
            self.writers.setdefault(event.choice, []).append(claim)
        elif isinstance(event, Finish):
            self.finished[event.choice] = event
        elif is_end(event):
            self.end = event  # type: ignore[assignment]
