"""A worker of both kinds that says what a test tells it to, through the real queue and the real chain."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.beat import Beat, ProcessRole, ProcessState
from schemas.errors import Settle
from schemas.events import Done, Event, Finish, Logprobs, Start, Token, Usage
from schemas.job import Job, parse_job
from schemas.subjects import Lane, Stage, tenant_and_lane
from services.bus.beats import BeatPublisher
from services.bus.cancels import CancelListener
from services.bus.connection import Bus
from services.bus.delivery import Delivery
from services.bus.history import last_message
from services.bus.queue import WorkQueue
from services.bus.replies import ReplyWriter
from services.bus.streams import Source, ensure_consumers, ensure_streams
from tests.gateway.tiny_model import token_id

BUILD = "0123456789ab"


@dataclass
class Work:
    """A job at hand. `lost` is set when somebody else has ended it."""

    job: Job
    delivery: Delivery
    writer: ReplyWriter
    lost: asyncio.Event

    def start(self, cached_tokens: int = 1) -> Start:
        assert self.job.id is not None
        num_prompt = len(self.job.prompt_token_ids or [])
        return Start(
            job=self.job.id,
            origin=self.delivery.origin,
            digest="d",
            build=BUILD,
            seed=self.job.seed or 7,
            prompt_tokens=num_prompt,
            cached_tokens=cached_tokens,
        )

    async def say(self, *events: Event) -> None:
        """One message, stored."""
        self.writer.put(*events)
        await self.writer.drained()


Script = Callable[[Work], Awaitable[None]]


def token(index: int, text: str, choice: int = 0, logprobs: int | None = None) -> Token:
    """`logprobs` is the number of alternatives wanted."""
    id_ = token_id(text.encode()[0]) if text else token_id(0xF0)
    found = None if logprobs is None else Logprobs(-0.25, [(id_, -0.25), (id_ + 1, -1.5)][:logprobs])
    return Token(choice=choice, index=index, id=id_, text=text, logprobs=found)


def ending(job: Job, num_tokens: int, held_back: str = "") -> list[Event]:
    """The finishes of all choices and the end of a job with `num_tokens` a choice."""
    finishes = [Finish(choice=c, reason="stop", text=held_back, tokens=num_tokens) for c in range(job.n)]
    num_prompt = len(job.prompt_token_ids or [])
    usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens * job.n, cached_tokens=1)
    return [*finishes, Done(usage=usage)]


def saying(*texts: str, held_back: str = "") -> Script:
    """Every choice says `texts`, a token each, and `held_back` at its end."""

    async def script(work: Work) -> None:
        await work.say(work.start())
        for index, text in enumerate(texts):
            await work.say(*(token(index, text, choice, work.job.logprobs) for choice in range(work.job.n)))
        await work.say(*ending(work.job, len(texts), held_back))

    return script


class ScriptedWorker:
    """`jobs` and `headers` are what it was given, `cancelled` the jobs that it was told to stop."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.script: Script = saying("Hello", " 世界", " 👋")
        self.state: ProcessState = "ok"
        self.taken: asyncio.Queue[Work] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self._bus = bus
        self._model = model
        self._sources = [Source(Stage.PREFILL, lane, model, BUILD) for lane in Lane]
        self._beats = [BeatPublisher(bus, lambda role=role: self._beat(role)) for role in ("prefill", "decode")]
        self._listener = CancelListener(bus, lambda _tenant, job: self.cancelled.put_nowait(job))
        self._queue: WorkQueue | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, *, take: bool = True) -> None:
        """`take` False: beats, and leaves the jobs in the queue."""
        await ensure_streams(self._bus, self._model)
        await ensure_consumers(self._bus, self._model, BUILD)
        await self._listener.start()
        for publisher in self._beats:
            await publisher.start()
        if take:
            self._queue = WorkQueue(self._bus, self._sources)
            self._spawn(self._take())

    async def beat(self) -> None:
        for publisher in self._beats:
            await publisher.beat()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._queue is not None:
            await self._queue.close()
        self.state = "stopped"
        for publisher in self._beats:
            await publisher.close()
        await self._listener.close()

    def _beat(self, role: ProcessRole) -> Beat:
        name = f"{role}-{self._model}"
        return Beat(process=name, role=role, state=self.state, model=self._model, build=BUILD, capacity=4)

    async def _take(self) -> None:
        assert self._queue is not None
        while True:
            self._spawn(self._work(await self._queue.next()))

    async def _work(self, delivery: Delivery) -> None:
        job = parse_job(delivery.data)
        tenant, _ = tenant_and_lane(delivery.subject)
        assert job.id is not None
        last = await last_message(self._bus, tenant, job.id)
        lost = asyncio.Event()
        sequence = last.sequence if last else 0
        writer = ReplyWriter(self._bus, tenant, job.id, sequence, delivery.claim(), on_lost=lost.set)
        work = Work(job, delivery, writer, lost)
        self.taken.put_nowait(work)
        if last is None or not last.ended:
            running = asyncio.create_task(self.script(work))
            stopped = asyncio.create_task(lost.wait())
            try:
                await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (running, stopped):
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
        await delivery.settle(Settle.ACK)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
