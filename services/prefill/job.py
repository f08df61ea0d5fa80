"""One job on its way through prefill: restore what is stored, compute the rest, publish token 0, store the blocks."""

import asyncio
import time
from functools import partial

from schemas.handoff import FirstToken, Handoff, handed_on, start_event
from schemas.subjects import Lane, Stage
from services import telemetry
from services.engine.batch import Batch
from services.engine.blocks import Restored
from services.engine.engine import Outcome
from services.engine.recheck import Difference
from services.engine.sampler import Sampled, Sampler
from services.engine.saver import Saver
from services.engine.sequence import Sequence
from services.prefill.draft import Draft
from services.text.grammar import Grammar
from services.worker.disagreement import report_differences
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime
from services.worker.stream import JobStream


class _HandedBack(Exception):
    """The worker leaves: the job goes on in another one."""


class PrefillJob:
    def __init__(self, runtime: Runtime, batch: Batch, run: JobRun, permit: Permit, draft: Draft) -> None:
        self._runtime = runtime
        self._batch = batch
        self._run = run
        self._permit = permit
        self._handoff = handoff = draft.handoff
        self._lookup = draft.lookup
        self._stream = JobStream(run.put, runtime.text, handoff.sampling, run.history)
        self._fetch_budget = runtime.blocks.fetch_budget(len(handoff.prompt_token_ids))
        self._timings = dict(handoff.timings)
        self._is_announced = run.history.start is not None
        self._cached_tokens = run.history.start.cached_tokens if run.history.start else 0
        self._computed: asyncio.Future[Outcome] | None = None
        self._is_handing_back = False
        self._grammar: Grammar | None = None

    async def perform(self) -> tuple[Handoff, Stage] | None:
        """The hand-off to publish, and for whom; None when the job has ended with its first tokens."""
        try:
            handoff = await self._perform()
        except _HandedBack:
            return await self._hand_on(0), Stage.REWORK
        return None if handoff is None else (handoff, Stage.DECODE)

    def hand_back(self) -> None:
        """Stops computing: the job goes to another prefill worker of the build, which finds the full blocks."""
        self._is_handing_back = True
        if self._computed is not None and not self._computed.done():
            self._computed.set_exception(_HandedBack())

    async def _perform(self) -> Handoff | None:
        stream = self._stream
        wanted = self._handoff.sampling.constraint
        if wanted is not None:
            self._grammar = await self._runtime.text.grammars.of(wanted, is_checked=False)
        stream.replay([(first.choice, Sampled(first.id, first.logprobs)) for first in self._handoff.first])
        stored_blocks = await self._compute(self._handoff.prompt_token_ids, self._wanted_first())
        if stream.finished:
            stream.end(len(self._handoff.prompt_token_ids), self._cached_tokens, self._timings)
            return None
        await self._rebuild_generated()
        return await self._hand_on(stored_blocks)

    def _wanted_first(self) -> list[int]:
        """Choices whose first token is to be sampled: those without one, and of a take-over those that have it on
        the reply subject, to see whether it comes out again."""
        published = self._run.history.tokens
        return [c.number for c in self._stream.choices if not c.token_ids or c.number in published]

    async def _compute(self, token_ids: list[int], choices: list[int]) -> int:
        """Puts K and V of `token_ids` into the store, and samples the first token of each of `choices`.

        Returns the number of leading blocks that are in the store.
        """
        runtime, handoff = self._runtime, self._handoff
        await self._permit.resize(1, runtime.pages_for(len(token_ids)))
        with telemetry.span("prefill.restore"):
            refs = runtime.blocks.refs(handoff.tenant, handoff.salt, token_ids)
            restored = await runtime.blocks.restore(refs, self._fetch_budget, self._lookup, reused=True)
        # The last token's logits are needed even when every block is a hit.
        num_known = min(restored.tokens, len(token_ids) - 1) if choices else restored.tokens
        names = partial(runtime.blocks.refs, handoff.tenant, handoff.salt)
        saver = Saver(runtime.blocks, runtime.pool, names, restored.used_at)
        computed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Token 0 goes first: copying the last pass's blocks would compete with it for the worker's core.
        last_blocks: list[int] = []
        sequence = Sequence(
            token_ids=token_ids,
            pages=list(restored.pages),
            num_computed=num_known,
            samplers=[self._sampler(choice) for choice in choices],
            on_computed=lambda outcome: None if computed.done() else computed.set_result(outcome),
            on_block_full=lambda b: saver.save_block(sequence, b) if sequence.num_missing else last_blocks.append(b),
            gives_way=self._run.delivery.lane is Lane.BATCH,
        )
        try:
            self._announce(num_known)
            self._run.is_preparing = False
            if sequence.num_missing:
                with telemetry.span("prefill.compute", rows=sequence.num_missing, cached=num_known):
                    joined_s = time.monotonic()
                    self._batch.join(sequence)
                    outcome = await self._outcome(computed, saver)
                    self._timings["prefill_s"] = time.monotonic() - joined_s
                    num_fresh = self._publish_first(choices, outcome)
                    await asyncio.sleep(0)  # it is on its way: what follows runs beside it
                    self._store_rest(saver, sequence, restored, last_blocks)
                    await self._run.settled()
                    self._count_first(num_fresh)
            else:
                self._store_rest(saver, sequence, restored, last_blocks)
            with telemetry.span("prefill.store"):
                return await saver.stored_blocks(restored.num_stored)
        finally:
            self._batch.leave(sequence)

    def _store_rest(self, saver: Saver, sequence: Sequence, restored: Restored, last_blocks: list[int]) -> None:
        """Begins to store what no pass has: the hand-off waits for it."""
        resident_only = range(restored.num_stored, len(restored.pages))  # the store has lost them
        for block in [*resident_only, *last_blocks]:
            saver.save_block(sequence, block, quickly=True)
        if restored.tokens < len(sequence.token_ids):
            saver.save_partial(sequence, quickly=True)

    async def _outcome(self, computed: asyncio.Future[Outcome], saver: Saver) -> Outcome:
        """Raises `_HandedBack`, once the blocks that are full are stored."""
        try:
            if self._is_handing_back:
                raise _HandedBack
            self._computed = computed
            return await computed
        except _HandedBack:
            await saver.stored_blocks(0)
            raise

    def _announce(self, num_cached: int) -> None:
        """Publishes `start`, once a job."""
        if self._is_announced:
            return
        self._is_announced = True
        self._cached_tokens = num_cached
        self._timings["queue_s"] = self._run.delivery.age_s()
        telemetry.prefix_tokens_asked.add(len(self._handoff.prompt_token_ids))
        telemetry.prefix_tokens_hit.add(num_cached)
        self._run.put(start_event(self._handoff, num_cached))

    def _publish_first(self, choices: list[int], outcome: Outcome) -> int:
        """Publishes the first tokens that are not known yet, and compares the others. Returns how many are new."""
        fresh = [number for number in choices if not self._stream.choices[number].token_ids]
        if isinstance(outcome, list):
            for number, sampled in zip(choices, outcome, strict=True):
                if number in fresh:
                    self._stream.push(self._stream.choices[number], sampled)
                else:
                    self._compare(number, sampled.id)
        else:
            for number in choices:
                if number not in fresh:
                    self._compare(number, None)
            raise outcome
        if fresh:
            self._timings["ttft_s"] = self._run.delivery.age_s()
            self._run.made_first_token()
        return len(fresh)

    def _compare(self, choice: int, computed: int | None) -> None:
        known = self._stream.choices[choice].token_ids[0]
        if computed != known:
            report_differences(self._run, choice, [Difference(0, known, computed)])

    def _count_first(self, num_fresh: int) -> None:
        """Once token 0 is on its way."""
        if num_fresh:
            telemetry.ttft_s.record(self._timings["ttft_s"])
            telemetry.tokens.add(len(self._handoff.prompt_token_ids) - self._cached_tokens, kind="prompt")
            telemetry.tokens.add(num_fresh, kind="generated")

    async def _rebuild_generated(self) -> None:
        """After a take-over choices may be long: decode continues each from blocks, so make those too.

        Not where decode has an arithmetic of its own: then only decode computes what it made.
        """
        if self._runtime.arithmetics.is_mixed:
            return
        for choice in self._stream.choices:
            if not choice.finished and len(choice.token_ids) > 1:
                await self._compute(self._handoff.prompt_token_ids + choice.token_ids[:-1], [])

    async def _hand_on(self, stored_blocks: int) -> Handoff:
        firsts = [
            FirstToken(choice=choice.number, id=choice.token_ids[0], logprobs=choice.first_logprobs)
            for choice in self._stream.choices
            if choice.token_ids
        ]
        return handed_on(
            self._handoff,
            last=await self._run.settled(),
            first=firsts,
            stored_blocks=stored_blocks,
            cached_tokens=self._cached_tokens,
            timings=self._timings,
            **self._run.time_left(),
        )

    def _sampler(self, choice: int) -> Sampler:
        sampling = self._handoff.sampling
        assert sampling.seed is not None
        matcher = self._grammar.matcher() if self._grammar is not None else None
        return Sampler(sampling, sampling.seed, choice, self._handoff.prompt_token_ids, matcher)
