"""Known tokens sampled once more: where a sequence computes rows whose next token is known, does it come out again?

A token is a function of its job, so a difference means that two workers disagree: other weights, a broken machine.
Knows nothing of who made the known tokens, or of what a difference leads to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.sampling import Row
from schemas.errors import GrammarFailed, NotFinite
from services.engine.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Difference:
    """`index` of the token in its choice. `computed` is None where nothing could be chosen."""

    index: int
    known: int
    computed: int | None


class Recheck:
    """Of one choice: `known` are its tokens, and those from number `first` on are compared.

    `sampler` is this object's own and has noted nothing yet. `compare` is called for one row after the other, by the
    thread that computes; the results are read between passes.
    """

    def __init__(self, sampler: Sampler, num_prompt: int, known: Sequence[int], first: int) -> None:
        self.num_compared = 0
        self.differences: list[Difference] = []
        self._sampler = sampler
        self._num_prompt = num_prompt
        self._known = list(known)
        self._next = first
        for token in self._known[:first]:
            sampler.note(token)

    def positions(self, start: int, end: int) -> range:
        """The rows in [start, end) whose next token is still to be compared."""
        before = self._num_prompt - 1  # the last row of the prompt gives token 0
        return range(max(start, before + self._next), min(end, before + len(self._known)))

    def compare(self, position: int, logits: Row) -> None:
        """`logits` of the row at `position`, one of `positions`; rows come in order, but may be left out."""
        index = position - (self._num_prompt - 1)
        for token in self._known[self._next : index]:
            self._sampler.note(token)
        known = self._known[index]
        try:
            computed: int | None = self._sampler.sample(logits, index, allowed=self._sampler.allowed()).id
        except (NotFinite, GrammarFailed):
            computed = None
        if computed != known:
            self.differences.append(Difference(index, known, computed))
        self.num_compared += 1
        self._sampler.note(known)
        self._next = index + 1
