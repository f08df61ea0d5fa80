"""Runs the lines of one batch that have no result yet, and stores theirs.

A line's jobs are named after it, so that a second run of the batch meets the first one's jobs, done or under way,
instead of starting others. Nothing is remembered elsewhere: what is missing on the results stream is to do.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import BinaryIO, NamedTuple, cast

import msgspec

from schemas.asked import Asked
from schemas.batch import ENDPOINTS
from schemas.errors import BusUnavailable, Cancelled, Internal, KvrelayError, QueueFull, TooLarge, error_from_code
from schemas.events import Error, Event, Token
from schemas.job import Job
from schemas.subjects import MSG_ID_HEADER, Lane, retry_id
from schemas.wire import encode
from services.batch.lines import Line, Place, Plan, parse_line, read_line
from services.batch.results import MAX_TRIES, Result, answered, job_of_line, not_run, refused, store
from services.batch.throttle import Throttle
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.publish import job_msg_id, submit_job
from services.bus.watch import watch
from services.openai.answer import Answer
from services.openai.intake import echoes_of, jobs_of
from services.openai.request_names import prompt_job_id
from services.openai.route import ROUTES, answer_to
from services.openai.token_names import TokenNames
from services.text.model import TextModel

RETRY_S = 0.2
STORED_AT_ONCE = 256

OnResult = Callable[[Result], None]


class Setting(NamedTuple):
    """Where a batch runs. `find`: the model of a name, raises `ModelNotFound`."""

    bus: Bus
    tenant: str
    find: Callable[[str], TextModel]
    names: dict[str, TokenNames]
    throttle: Throttle
    strict: bool = False


class BatchRun:
    """`on_result` hears of each result that was stored by this run."""

    def __init__(self, setting: Setting, batch: str, endpoint: str, file: BinaryIO, on_result: OnResult) -> None:
        self._setting = setting
        self._batch = batch
        self._endpoint = endpoint
        self._file = file
        self._on_result = on_result
        self._reading = asyncio.Lock()
        self._under_way: set[int] = set()  # lines

    async def run(self, plan: Plan, done: set[int]) -> None:
        """Until every line has a result. Cancelled, it leaves the jobs under way alone: the next run finds them."""
        for place, custom_id, error in plan.bad:
            if place.number not in done:
                result = not_run(self._batch, place.number, custom_id, error.code, error.message)
                await self._store(result, custom_id)
        throttle = self._setting.throttle
        async with asyncio.TaskGroup() as group:
            for place in plan.places:
                if place.number not in done:
                    slot = contextlib.AsyncExitStack()
                    await slot.enter_async_context(throttle.place())
                    group.create_task(self._line(place, slot))

    async def give_up(self, message: str) -> None:
        """Cancels the jobs that were under way when the run was cancelled."""
        under_way, self._under_way = self._under_way, set()
        for line in under_way:
            with contextlib.suppress(BusUnavailable):
                await cancel_job(self._setting.bus, self._setting.tenant, self._job(line), Cancelled(message))

    async def refuse_rest(self, plan: Plan, done: set[int], code: str, message: str) -> None:
        """Every line without a result gets one that says why."""
        left = [place for place in plan.places if place.number not in done]
        for first in range(0, len(left), STORED_AT_ONCE):
            await asyncio.gather(
                *(self._refuse(place, code, message) for place in left[first : first + STORED_AT_ONCE])
            )

    async def _refuse(self, place: Place, code: str, message: str) -> None:
        custom_id = bytes(parse_line(await self._read(place), self._endpoint).custom_id)
        await self._store(not_run(self._batch, place.number, custom_id, code, message), custom_id)

    async def _line(self, place: Place, slot: contextlib.AsyncExitStack) -> None:
        async with slot:
            self._under_way.add(place.number)
            line = parse_line(await self._read(place), self._endpoint)
            custom_id, request = bytes(line.custom_id), self._job(place.number)
            try:
                body = await self._answered(line, request)
            except KvrelayError as error:
                result = refused(self._batch, place.number, custom_id, request, error)
            else:
                result = answered(self._batch, place.number, custom_id, request, body)
            await self._store(result, custom_id)
            self._under_way.discard(place.number)

    def _job(self, line: int) -> str:
        return job_of_line(self._batch, line)

    async def _read(self, place: Place) -> bytes:
        async with self._reading:
            return await asyncio.to_thread(read_line, self._file, place)

    async def _store(self, result: Result, custom_id: bytes) -> None:
        bus, tenant = self._setting.bus, self._setting.tenant
        try:
            is_new = await store(bus, tenant, self._batch, result)
        except TooLarge as error:
            result = not_run(self._batch, result.line, custom_id, error.code, error.message)
            is_new = await store(bus, tenant, self._batch, result)
        if is_new:
            self._on_result(result)

    async def _answered(self, line: Line, request: str) -> bytes:
        """The body of its answer. Raises what the line's request ended with, after the last try."""
        route = ROUTES[ENDPOINTS[self._endpoint]]
        asked = route.parse(bytes(line.body), strict=self._setting.strict)
        text = self._setting.find(asked.model)
        jobs = await jobs_of(asked, text, request, None)
        echo = echoes_of(asked, jobs, text)
        spelled = Asked(
            key=request,
            route=route.name,
            created=int(time.time()),
            num_prompts=len(jobs),
            n=asked.n or 1,
            logprobs=asked.num_logprobs is not None,
            include_metrics=bool(asked.include_metrics),
            tools=asked.has_tools,
        )
        for attempt in range(MAX_TRIES):
            name = retry_id(request, attempt) if attempt else request
            answer = answer_to(spelled, text.slug, self._setting.names[text.slug])
            answer.begin_with(echo)
            try:
                await self._run_jobs(_named(jobs, name), answer)
            except KvrelayError as error:
                if attempt + 1 == MAX_TRIES or not (error.retryable or isinstance(error, Internal)):
                    raise
            else:
                return answer.whole()
        raise AssertionError

    async def _run_jobs(self, jobs: Iterable[Job], answer: Answer) -> None:
        """One after the other: what a line asks for several times over shares its beginning."""
        for number, job in enumerate(jobs):
            async with contextlib.aclosing(self._events(job)) as events:
                async for event in events:
                    if isinstance(event, Error):
                        raise error_from_code(event.code, event.message, event.param)
                    answer.take([(number, event)])

    async def _events(self, job: Job) -> AsyncGenerator[Event, None]:
        assert job.id is not None
        async with contextlib.AsyncExitStack() as turn:
            await turn.enter_async_context(self._setting.throttle.turn())
            await self._submit(job)
            watched = cast(AsyncGenerator[Event, None], watch(self._setting.bus, self._setting.tenant, job.id))
            async with contextlib.aclosing(watched):
                async for event in watched:
                    if isinstance(event, Token):
                        await turn.aclose()
                    yield event

    async def _submit(self, job: Job) -> None:
        """Waits for room in the queue, and for the broker. A job that is there, or done, is not run again."""
        bus, tenant = self._setting.bus, self._setting.tenant
        assert job.model is not None and job.id is not None
        headers = {MSG_ID_HEADER: job_msg_id(tenant, job.id)}
        while True:
            try:
                await submit_job(bus, tenant, job.model, Lane.BATCH, encode(job), headers)
                return
            except (QueueFull, BusUnavailable):
                await asyncio.sleep(RETRY_S)
                await bus.wait_connected()


def _named(jobs: list[Job], name: str) -> list[Job]:
    if len(jobs) == 1:
        return [msgspec.structs.replace(jobs[0], id=name)]
    return [msgspec.structs.replace(job, id=prompt_job_id(name, number)) for number, job in enumerate(jobs)]
