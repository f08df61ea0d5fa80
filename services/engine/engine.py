"""The model on its own thread: rows of token ids in, sampled tokens out, one pass at a time.

Knows nothing of jobs, batching policy, text or the queue. A pass is a list of `Work`; what the rows of one
`Work` produce does not depend on the others (`services.engine.model` sees to that).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from schemas.errors import NotFinite
from services.engine.model import Model, Span
from services.engine.pages import PagePool
from services.engine.rate import Rate
from services.engine.recheck import Recheck
from services.engine.sampler import Row, Sampled, Sampler

MIN_PREFILL_ROWS = 16

T = TypeVar("T")


@dataclass(slots=True)
class Work:
    """Rows of one sequence: `token_ids` at positions `start`..., whose K and V go to `pages`.

    `pages` cover positions [0, start + len(token_ids)). From the last row's logits one token is sampled for each
    of `samplers`, as token number `index` of its choice. Known tokens are compared with what `recheck` samples from
    the rows before them. Of rows that neither wants no logits are computed.
    """

    token_ids: list[int]
    start: int
    pages: list[int]
    samplers: list[Sampler] = field(default_factory=list)
    index: int = 0
    recheck: Recheck | None = None

    @property
    def rechecked(self) -> range:
        """Positions of the rows whose next token `recheck` wants to compare."""
        return self.recheck.positions(self.start, self.start + len(self.token_ids)) if self.recheck else range(0)


Outcome = list[Sampled] | NotFinite


class Engine:
    """Owns the model's thread; closing it waits for the pass under way."""

    def __init__(self, model: Model, pool: PagePool) -> None:
        self.model = model
        self.pool = pool
        self.num_passes = 0
        self.prefill_rate = Rate()  # tokens a second, in passes of at least `MIN_PREFILL_ROWS`
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, works: Seq[Work]) -> list[Outcome]:
        """One pass. An outcome is the sampled tokens, or the error that concerns this `Work` alone."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, works)

    async def between_passes(self, call: Callable[[], T]) -> T:
        """Of what uses the model beside its passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def run_now(self, works: Seq[Work]) -> list[Outcome]:
        """The same on the calling thread."""
        token_ids = [token for work in works for token in work.token_ids]
        spans = [Span(work.start, len(work.token_ids), work.pages) for work in works]
        logit_rows, end = [], 0
        for work in works:
            begin, end = end, end + len(work.token_ids)
            logit_rows += [begin + position - work.start for position in work.rechecked]
            if work.samplers:
                logit_rows.append(end - 1)
        self.num_passes += 1
        began_s = time.perf_counter()
        logits = iter(self.model.forward(token_ids, spans, self.pool.data, logit_rows).numpy())
        if len(token_ids) >= MIN_PREFILL_ROWS:
            self.prefill_rate.note(len(token_ids), time.perf_counter() - began_s)
        return [_outcome(work, logits) for work in works]

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _outcome(work: Work, logits: Iterator[Row]) -> Outcome:
    if work.recheck is not None:
        for position in work.rechecked:
            work.recheck.compare(position, next(logits))
    if not work.samplers:
        return []
    last = next(logits)
    try:
        return [sampler.sample(last, work.index) for sampler in work.samplers]
    except NotFinite as error:
        return error
