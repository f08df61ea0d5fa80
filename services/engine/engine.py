"""The model on its own thread: rows of token ids in, sampled tokens out, one pass at a time.

Knows nothing of jobs, batching policy, text or the queue. A pass is a list of `Work`; what the rows of one
`Work` produce does not depend on the others (`services.engine.model` sees to that).
"""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import Draw
from schemas.errors import GrammarFailed, NotFinite
from services.engine.lease import Cores
from services.engine.masking import Allowed, Masking, has_core_beside
from services.engine.model import Model, Span
from services.engine.pages import PagePool
from services.engine.rate import Rate
from services.engine.recheck import Recheck
from services.engine.sampler import Sampled, Sampler, not_finite
from services.engine.step_cost import StepCost
from services.engine.stepper import Found, Gate, Passed, Stepper, Wanted

MIN_PREFILL_ROWS = 16

T = TypeVar("T")


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Work:
    """Rows of one sequence: `token_ids` at positions `start`..., whose K and V go to `pages`.

    From the last row's logits one token is sampled for each of `samplers`, as token number `index` of its choice.
    Known tokens are compared with what `recheck` samples from the rows before them.
    `draft` are guesses of what the one sampler will choose from that row on: their rows are computed too, and as far
    as they come true each gives one token more. `pages` cover positions [0, start + len(token_ids) + len(draft)).
    Of rows that nobody wants no logits are computed.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    samplers: list[Sampler] = field(default_factory=list)
    index: int = 0
    recheck: Recheck | None = None
    draft: list[int] = field(default_factory=list)
    allowed: list[Allowed | None] = field(init=False, default_factory=list)  # of each sampler, once it is `wanted`

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + len(self.draft)

    @property
    def rechecked(self) -> range:
        """Positions of the rows whose next token `recheck` wants to compare."""
        return self.recheck.positions(self.start, self.start + len(self.token_ids)) if self.recheck else range(0)

    def wanted(self, first_row: int) -> list[Wanted]:
        """Of the rows, whose first is `first_row` of the pass."""
        wanted = [Wanted(first_row + position - self.start, None) for position in self.rechecked]
        last = first_row + len(self.token_ids) - 1
        self.allowed = [
            None if sampler.matcher is None else Allowed(sampler.matcher, self.draft) for sampler in self.samplers
        ]
        return wanted + [
            Wanted(last + ahead, self._draw(number, ahead))
            for number in range(len(self.samplers))
            for ahead in range(1 + len(self.draft))
        ]

    def sampled(self, number: int, answer: Found, since: Seq[int] = ()) -> Sampled:
        """By sampler `number`, behind the guesses `since`. Raises `NotFinite`, and `GrammarFailed` without any."""
        allowed, ahead = self.allowed[number], len(since)
        if allowed is not None and allowed.failure is not None:
            raise allowed.failure
        if answer is None:
            raise not_finite()
        if isinstance(answer, int):
            return Sampled(answer, None)
        mask = None if allowed is None else allowed.mask(ahead)
        return self.samplers[number].sample(answer, self.index + ahead, since, mask)

    def _draw(self, number: int, ahead: int) -> Draw | None:
        sampler, allowed = self.samplers[number], self.allowed[number]
        if not sampler.is_plain:
            return None
        return sampler.draw(self.index + ahead, None if allowed is None else allowed.mask(ahead))


Failure = NotFinite | GrammarFailed
Outcome = list[Sampled] | Failure
"""A token for each sampler; of a `draft` the tokens that came true and the next one."""


class Engine:
    """Owns the model's thread; closing it waits for the pass under way."""

    def __init__(self, model: Model, pool: PagePool, cores: Cores | None = None) -> None:
        """`cores`: asked before each pass how many threads it may have; None: always the model's own."""
        self._cores = cores
        self.model = model
        self.pool = pool
        self.num_passes = 0
        self.prefill_rate = Rate()  # tokens a second, in passes of at least `MIN_PREFILL_ROWS`
        self.sampling_s = 0.0  # of all passes so far, what choosing tokens took
        self.step_cost = StepCost()
        self._stepper = model if isinstance(model, Stepper) else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._masking = Masking()
        self._num_threads = torch.get_num_threads()

    async def run(self, works: Seq[Work]) -> list[Outcome]:
        """One pass. An outcome is the sampled tokens, or the error that concerns this `Work` alone."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, works)

    async def between_passes(self, call: Callable[[], T]) -> T:
        """Of what uses the model beside its passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def run_now(self, works: Seq[Work]) -> list[Outcome]:
        """The same on the calling thread."""
        if self._cores is None:
            return self._run(works)
        lease = self._cores.begin()
        self._num_threads = lease.own + lease.lent
        self.model.use_threads(lease)
        try:
            return self._run(works)
        finally:
            self._cores.end()

    def _run(self, works: Seq[Work]) -> list[Outcome]:
        token_ids: list[int] = []
        wanted: list[list[Wanted]] = []
        for work in works:
            wanted.append(work.wanted(len(token_ids)))
            token_ids += (*work.token_ids, *work.draft)
        spans = [Span(work.start, work.num_rows, work.pages) for work in works]
        self.num_passes += 1
        began_s = time.perf_counter()
        allowed = [one for work in works for one in work.allowed if one is not None]
        found, finite = self._pass(token_ids, spans, [want for wants in wanted for want in wants], allowed)
        self._note_time(len(token_ids), time.perf_counter() - began_s)
        computed_s = time.perf_counter()
        answers, row, outcomes = iter(found), 0, []
        for work, wants in zip(works, wanted, strict=True):
            own = finite[row : row + work.num_rows]
            outcomes.append(_outcome(work, list(islice(answers, len(wants))), own))
            row += work.num_rows
        self.sampling_s += time.perf_counter() - computed_s
        return outcomes

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._masking.close()

    def _pass(self, token_ids: Seq[int], spans: Seq[Span], wanted: Seq[Wanted], allowed: Seq[Allowed]) -> Passed:
        """What is `allowed` is known when it returns."""
        if not (allowed and has_core_beside(self._num_threads)):
            for one in allowed:
                one.find()
            return self._computed(token_ids, spans, wanted, None)
        gate = self._stepper.new_gate() if self._stepper is not None else None
        finding = self._masking.begin(allowed, _nothing if gate is None else gate.open)
        try:
            return self._computed(token_ids, spans, wanted, gate)
        finally:
            finding.result()

    def _computed(self, token_ids: Seq[int], spans: Seq[Span], wanted: Seq[Wanted], gate: Gate | None) -> Passed:
        if self._stepper is not None:
            return self._stepper.step(token_ids, spans, self.pool.data, wanted, gate)
        logits = self.model.forward(token_ids, spans, self.pool.data, [want.row for want in wanted]).numpy()
        return Passed(list(logits), self.pool.finite_rows(spans))

    def _note_time(self, rows: int, seconds: float) -> None:
        self.step_cost.note(rows, seconds)
        if rows >= MIN_PREFILL_ROWS:
            self.prefill_rate.note(rows, seconds)


def _outcome(work: Work, found: list[Found], finite: npt.NDArray[np.bool_]) -> Outcome:
    """`found`: for each of what the work wanted; `finite`: of its rows."""
    if not finite[: len(work.token_ids)].all():
        return not_finite()
    answers = iter(found)
    if work.recheck is not None:
        for position in work.rechecked:
            logits = next(answers)
            assert isinstance(logits, np.ndarray)
            work.recheck.compare(position, logits)
    try:
        if not work.draft:
            return [work.sampled(number, next(answers)) for number in range(len(work.samplers))]
    except (NotFinite, GrammarFailed) as error:
        return error
    return _accepted(work, list(answers), finite[len(work.token_ids) :])


def _accepted(work: Work, answers: list[Found], finite: npt.NDArray[np.bool_]) -> Outcome:
    """The tokens of a draft, up to the first that is another or, for the next pass to say so, no number."""
    tokens: list[Sampled] = []
    since: list[int] = []
    for ahead, answer in enumerate(answers):
        if ahead and not finite[ahead - 1]:
            break
        try:
            sampled = work.sampled(0, answer, since)
        except (NotFinite, GrammarFailed) as error:
            if not tokens:
                return error
            break
        tokens.append(sampled)
        since.append(sampled.id)
        if ahead == len(work.draft) or sampled.id != work.draft[ahead]:
            break
    return tokens
