"""Where in an answer a reader is: what the `id:` of a server-sent event says, the same on every gateway.

For each choice a number: 0 nothing, 1 its opening, i + 2 up to token i, then one more for the text that came with its
finish, and one more for its end. They follow from the choice's own events, however those of several choices, or of
several jobs, came to be interleaved. `tail` counts what follows all choices.

Spelled `12`, or `5x3,4` for three choices at 5 and one at 4, with `+1` behind it for a tail of 1.
"""

import re
from dataclasses import dataclass
from itertools import groupby

from schemas.errors import InvalidRequest

OPENED = 1
USAGE_SAID, DONE_SAID, ERROR_SAID = 1, 2, 3

_RUN = r"\d{1,9}(?:x\d{1,5})?"
_SPELLED = re.compile(rf"({_RUN}(?:,{_RUN})*)(?:\+([123]))?")


def of_token(index: int) -> int:
    return OPENED + 1 + index


def of_last_text(num_tokens: int) -> int:
    return OPENED + 1 + num_tokens


def of_closing(num_tokens: int) -> int:
    return of_last_text(num_tokens) + 1


@dataclass
class Position:
    choices: list[int]
    tail: int = 0

    @classmethod
    def start(cls, num_choices: int) -> "Position":
        return cls([0] * num_choices)

    @classmethod
    def parse(cls, text: str, num_choices: int) -> "Position":
        """Raises `InvalidRequest` for what is no position of an answer with so many choices."""
        found = _SPELLED.fullmatch(text)
        choices: list[int] = []
        for run in found[1].split(",") if found else ():
            value, _, times = run.partition("x")
            choices += [int(value)] * min(int(times or 1), num_choices + 1)
        if found is None or len(choices) != num_choices:
            raise InvalidRequest(f"{text[:80]!r} is no event id of this answer", param="Last-Event-ID")
        return cls(choices, int(found[2] or 0))

    @property
    def is_at_end(self) -> bool:
        return self.tail >= DONE_SAID

    def __str__(self) -> str:
        if len(self.choices) == 1 and not self.tail:
            return str(self.choices[0])
        runs = ((value, sum(1 for _ in run)) for value, run in groupby(self.choices))
        spelled = ",".join(f"{value}x{times}" if times > 1 else str(value) for value, times in runs)
        return f"{spelled}+{self.tail}" if self.tail else spelled
