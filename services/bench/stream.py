"""One job through a running pipeline, as a plain reader saw its tokens come."""

import random
import time

import msgspec

from schemas.errors import error_from_code
from schemas.events import Done, Error, Start, Token
from schemas.job import Job
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import submit_job
from services.bus.reader import following

SILENCE_S = 60.0


class RandomPrompts:
    """That nobody has seen, of ids that are neither the first nor the last of a vocabulary: those are special."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = range(vocab_size // 10, vocab_size * 4 // 5)
        self._random = random.Random(time.time_ns())

    def __call__(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=num_tokens)


class Stream(msgspec.Struct):
    """Seconds from the publication to each token, as a plain reader saw them; `prefill_s` is what computing took."""

    tokens_s: list[float]
    prefill_s: float
    cached_tokens: int = 0
    token_ids: list[int] = []

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0]

    @property
    def added_s(self) -> float:
        """What queue, store and streaming add to the first token."""
        return self.tokens_s[0] - self.prefill_s

    @property
    def first_gap_s(self) -> float:
        """From token 0, which prefill made, to token 1: hand-off, store and claim lie between."""
        return self.tokens_s[1] - self.tokens_s[0]

    @property
    def tokens_per_s(self) -> float:
        """Of decode: from token 1 on."""
        return (len(self.tokens_s) - 2) / (self.tokens_s[-1] - self.tokens_s[1])


async def ask(
    bus: Bus, model: str, prompt: list[int], num_tokens: int, salt: str = "", silence_s: float = SILENCE_S
) -> Stream:
    """Greedy, past the model's own end. Raises the job's error, and `DeadlineExceeded` after a silence so long: a job
    in a queue is silent too."""
    job = Job(
        id=f"bench-{time.time_ns()}", prompt_token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True,
        cache_salt=salt,
    )  # fmt: skip
    assert job.id is not None
    stream = Stream([], 0.0)
    async with following(bus, bus.settings.tenant, job.id, silence_s=silence_s) as events:
        started_s = time.perf_counter()
        await submit_job(bus, bus.settings.tenant, model, Lane.INTERACTIVE, encode(job))
        async for event in events:
            if isinstance(event, Start):
                stream.cached_tokens = event.cached_tokens
            if isinstance(event, Token):
                stream.tokens_s.append(time.perf_counter() - started_s)
                stream.token_ids.append(event.id)
            if isinstance(event, Error):
                raise error_from_code(event.code, event.message)
            if isinstance(event, Done):
                stream.prefill_s = event.timings["prefill_s"]
    return stream
