"""How far a reader has got with a job: what it keeps to go on later, or elsewhere."""

import msgspec

from schemas.events import Event, Finish, Token


class Place(msgspec.Struct, kw_only=True):
    """`tokens`: how many of each choice were given; `finished`: the choices whose finish was. Encodes to plain JSON."""

    tokens: dict[int, int] = {}
    finished: list[int] = []

    def note(self, event: Event) -> None:
        """The reader is given `event`."""
        if isinstance(event, Token):
            self.tokens[event.choice] = event.index + 1
        elif isinstance(event, Finish) and event.choice not in self.finished:
            self.finished.append(event.choice)

    def is_behind(self, event: Event) -> bool:
        """Whether the reader was given `event` before; of tokens and finishes only, the others come again."""
        if isinstance(event, Token):
            return event.index < self.tokens.get(event.choice, 0)
        return isinstance(event, Finish) and event.choice in self.finished
