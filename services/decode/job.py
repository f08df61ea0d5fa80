"""One job on its way through decode: merge its blocks into pages, generate, or pass it on."""

import asyncio
import contextlib
import time
from typing import NamedTuple

from schemas.errors import ClaimLost, HandedBack, InvalidRequest, KvUnavailable
from schemas.handoff import Handoff, handed_on, start_event
from schemas.subjects import Stage
from services import telemetry
from services.decode.chain import chain_of
from services.decode.generation import Generation
from services.engine.batch import Batch
from services.engine.blocks import Lookup, Restored
from services.engine.choice import Choice
from services.engine.engine import Outcome
from services.engine.sampler import Sampled
from services.text.grammar import Grammar
from services.worker.disagreement import report_differences
from services.worker.room import Permit
from services.worker.run import JobRun
from services.worker.runtime import Runtime
from services.worker.stream import JobStream


class PassedOn(NamedTuple):
    handoff: Handoff
    stage: Stage


class Prepared(NamedTuple):
    """The hand-off, and what the store says of its prompt's blocks."""

    handoff: Handoff
    lookup: Lookup


class DecodeJob:
    def __init__(
        self,
        runtime: Runtime,
        batch: Batch,
        run: JobRun,
        permit: Permit,
        taken: Prepared,
        handing_back: asyncio.Event,
    ) -> None:
        self._runtime = runtime
        self._batch = batch
        self._run = run
        self._permit = permit
        self._handoff = handoff = taken.handoff
        self._lookup = taken.lookup
        self._chain = chain_of(runtime, handoff)
        self._handing_back = handing_back
        self._stream = JobStream(run.put, runtime.text, handoff.sampling, run.history)
        self._generations: list[Generation] = []
        self._all_finished = asyncio.Event()
        self._relief: asyncio.Task[None] | None = None
        self._grammar: Grammar | None = None

    async def perform(self) -> PassedOn | None:
        """What to publish instead of going on, or None when the job has ended."""
        started_s = time.monotonic()
        self._announce_if_lost()
        self._stream.replay([(first.choice, Sampled(first.id, first.logprobs)) for first in self._handoff.first])
        live = [choice for choice in self._stream.choices if not choice.finished]
        try:
            if live:
                wanted = self._handoff.sampling.constraint
                if wanted is not None:
                    self._grammar = await self._runtime.text.grammars.of(wanted, is_checked=True)
                await self._make_room(live)
                if not await self._merge(live):
                    return PassedOn(await self._handed_on(reworked=True), Stage.REWORK)
                await self._generate()
            if not self._stream.finished:
                return await self._hand_back()
        finally:
            for generation in self._generations:
                self._batch.leave(generation.sequence)
        timings = self._handoff.timings | {"decode_s": time.monotonic() - started_s}
        self._stream.end(len(self._handoff.prompt_token_ids), self._cached_tokens(), timings)
        return None

    async def _make_room(self, live: list[Choice]) -> None:
        """Promised for the longest that the job may become, so that it never runs out in the middle."""
        sampling = self._handoff.sampling
        assert sampling.max_tokens is not None
        pages = self._runtime.pages_for(len(self._handoff.prompt_token_ids) + sampling.max_tokens)
        if pages * len(live) > self._runtime.pool.num_pages:
            raise InvalidRequest("n answers of max_tokens do not fit into the KV memory of a decode worker", param="n")
        await self._permit.resize(len(live), pages * len(live))

    async def _merge(self, live: list[Choice]) -> bool:
        """Restores each choice's known tokens into pages; False when prefill should rebuild them first."""
        handoff, blocks, chain = self._handoff, self._runtime.prompt_blocks, self._chain
        budget = blocks.fetch_budget(None if chain.first_row else len(handoff.prompt_token_ids))
        for choice in live:
            known = handoff.prompt_token_ids + choice.token_ids
            with telemetry.span("decode.merge", choice=choice.number):
                restored = await chain.restore(known[:-1], budget, self._lookup)
            self._generations.append(self._generation(choice, restored))
        if min(generation.sequence.num_computed for generation in self._generations) < chain.first_row:
            telemetry.failed_loads.add()
            if handoff.reworked:
                raise KvUnavailable("the prompt's blocks are lost, and decode of this build cannot compute them")
            return False
        if chain.first_row:
            return True  # any number of its own tokens
        missing = max(generation.sequence.num_missing for generation in self._generations)
        expected = handoff.stored_blocks == self._runtime.pages_for(len(handoff.prompt_token_ids))
        if missing - 1 > self._runtime.pool.block_tokens and expected:
            telemetry.failed_loads.add()
            return handoff.reworked
        return True

    def _generation(self, choice: Choice, restored: Restored) -> Generation:
        generation = Generation(self._runtime, self._handoff, self._chain, choice, restored, self._grammar)
        generation.sequence.is_paused = self._is_congested
        generation.sequence.on_computed = lambda outcome: self._on_computed(generation, outcome)
        num_published = len(self._run.history.tokens.get(choice.number, []))
        # A mere hand-off by prefill is no take-over: nothing is computed for the comparison alone.
        taken_over = num_published > 1 or self._run.delivery.num_delivered > 1
        generation.recheck(num_published, at_least_one=taken_over)
        return generation

    async def _generate(self) -> None:
        """Until every choice is finished or the worker hands its jobs back."""
        self._run.is_preparing = False
        with telemetry.span("decode.generate", sequences=len(self._generations)):
            for generation in self._generations:
                self._batch.join(generation.sequence)
            waits = [asyncio.create_task(event.wait()) for event in (self._all_finished, self._handing_back)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _on_computed(self, generation: Generation, outcome: Outcome) -> None:
        if not isinstance(outcome, list):
            self._run.interrupt(outcome)
            return
        if generation.sequence.recheck is not None:
            report_differences(self._run, generation.choice.number, generation.differences())
        (sampled,) = outcome
        self._stream.push(generation.choice, sampled)
        self._run.made_first_token()
        self._count_token(generation)
        if generation.choice.finished:
            self._batch.leave(generation.sequence)
            if self._stream.finished:
                self._all_finished.set()
            return
        generation.go_on(sampled)

    def _is_congested(self) -> bool:
        """The broker is behind: the job pauses until everything is stored."""
        if not self._run.writer.congested:
            return False
        if self._relief is None:
            self._relief = asyncio.create_task(self._go_on_when_drained())
        return True

    async def _go_on_when_drained(self) -> None:
        with contextlib.suppress(ClaimLost):
            await self._run.settled()
        self._relief = None
        self._batch.wake()

    def _count_token(self, generation: Generation) -> None:
        now_s = time.monotonic()
        telemetry.itl_s.record(now_s - generation.last_token_s)
        telemetry.tokens.add(1, kind="generated")
        generation.last_token_s = now_s

    async def _hand_back(self) -> PassedOn:
        """Stores what is computed and gives the job to another worker of the build.

        Raises `HandedBack` when this delivery has made an event: the message goes to the next worker before all that
        waits in the queue. Otherwise that would count against the job, so it queues again.
        """
        unfinished = [generation for generation in self._generations if not generation.choice.finished]
        await self._batch.withdraw([generation.sequence for generation in unfinished])
        for generation in unfinished:
            generation.saver.save_partial(generation.sequence)
            await generation.saver.stored_blocks(0)
        handoff = await self._handed_on()
        if self._run.writer.published:
            raise HandedBack("the worker leaves")
        return PassedOn(handoff, Stage.DECODE)

    async def _handed_on(self, **changes: object) -> Handoff:
        last = await self._run.settled()
        return handed_on(self._handoff, last=last, **self._run.time_left(), **changes)

    def _announce_if_lost(self) -> None:
        """Writes `start` again if the broker lost it: readers need it, and so does a repeat of the job."""
        if self._run.history.start is None:
            self._run.put(start_event(self._handoff, self._handoff.cached_tokens))

    def _cached_tokens(self) -> int:
        start = self._run.history.start
        return start.cached_tokens if start is not None else self._handoff.cached_tokens
