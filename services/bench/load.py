"""A load on a running pipeline, as plain readers make it: answers that are long, and prompts that nobody has seen."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from schemas.errors import KvrelayError
from services.bench.stream import RandomPrompts, Stream, ask
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.models.registry import resolve
from services.settings import Settings

NUM_ANSWERS = 4
ANSWER_PROMPT_TOKENS = 64
PROMPTS_IN_FLIGHT = 2  # one is computed while the next one comes


class Done:
    """What was done of late, each with when."""

    def __init__(self) -> None:
        self.streams: list[tuple[float, Stream]] = []
        self._changed = asyncio.Event()

    def add(self, stream: Stream) -> None:
        self.streams.append((time.perf_counter(), stream))
        self._changed.set()

    async def reaches(self, count: int) -> float:
        """When there were so many, as soon as there are."""
        while len(self.streams) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.streams[count - 1][0]


class Load:
    """`num_tokens`: of an answer; `num_prompt`: of a prompt, which is answered with one token."""

    def __init__(self, settings: Settings, nats_url: str, num_prompt: int, num_tokens: int) -> None:
        files = resolve(settings.compute.model, settings.kv.data_dir)
        self.slug = files.slug
        self.num_prompt = num_prompt
        self._settings = settings
        self._nats_url = nats_url
        self._prompt_ids = RandomPrompts(files.vocab_size)
        self._num_tokens = num_tokens

    async def connect(self) -> Bus:
        return await Bus.connect(self._nats_url, "bench", self._settings.bus)

    async def answer(self, bus: Bus) -> Stream:
        return await ask(bus, self.slug, self._prompt_ids(ANSWER_PROMPT_TOKENS), self._num_tokens)

    @asynccontextmanager
    async def answers(self, bus: Bus) -> AsyncIterator[Done]:
        """So many at a time as long as this lasts."""
        async with _one_after_the_other(lambda: self.answer(bus), NUM_ANSWERS) as done:
            yield done

    @asynccontextmanager
    async def prompts(self, bus: Bus) -> AsyncIterator[Done]:
        async with _one_after_the_other(
            lambda: ask(bus, self.slug, self._prompt_ids(self.num_prompt), 1), PROMPTS_IN_FLIGHT
        ) as done:
            yield done


def gaps_ms(stream: Stream) -> list[float]:
    """From token 1 on: before it lies the hand-off."""
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(stream.tokens_s[1:])]


async def decode_pid(bus: Bus, slug: str) -> int:
    """Of the decode worker, as soon as there is one."""
    beats = BeatTable(bus)
    await beats.start()
    try:
        return (await beats.wait_for_worker("decode", slug)).pid
    finally:
        await beats.close()


@asynccontextmanager
async def _one_after_the_other(make: Callable[[], Coroutine[None, None, Stream]], at_once: int) -> AsyncIterator[Done]:
    """Raises what one of them raises, in the middle too."""
    done = Done()

    async def again_and_again() -> None:
        while True:
            done.add(await make())

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(again_and_again()) for _ in range(at_once)]
            yield done
            for task in tasks:
                task.cancel()
    except* KvrelayError as errors:
        raise errors.exceptions[0] from None
