"""Eight streams at once over NATS, and what must be the same about them after any crash."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from schemas.events import Done, Event, Finish, Start, Token
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import submit_job
from services.bus.reader import follow
from tests.golden.passages import PASSAGES, SYSTEM

MODEL = "smollm2-135m-instruct"
SILENCE_S = 60.0

_numbers = itertools.count()


def eight_jobs(max_tokens: int, prompt_chars: int = 200) -> list[dict[str, Any]]:
    """Greedy and sampled, one choice and two, shared prefixes and none, with a stop string and without."""
    common = {"max_tokens": max_tokens, "ignore_eos": True}
    prompts = [passage[:prompt_chars] for passage in PASSAGES[:6]]
    jobs: list[dict[str, Any]] = [
        {"prompt": prompts[0], "temperature": 0.0},
        {"prompt": prompts[1], "seed": 1},
        {"prompt": prompts[2], "seed": 2, "n": 2},
        {"prompt": prompts[3], "seed": 3, "repetition_penalty": 1.2, "logprobs": 2},
        {"prompt": prompts[4] + prompts[5], "seed": 4, "top_p": 0.9, "stop": ["\n\n\n\n"]},
        {"prompt": prompts[4] + prompts[0], "temperature": 0.0, "frequency_penalty": 0.5},
        {"messages": _turns("Write one sentence about rain."), "temperature": 0.0},
        {"messages": _turns("Repeat exactly this text: 👋🏽 日本語 🎉"), "seed": 5},
    ]
    return [{**common, **job} for job in jobs]


def _turns(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def run_jobs(
    bus: Bus, jobs: list[dict[str, Any]], on_event: Callable[[Event], None] = lambda event: None
) -> list[list[Event]]:
    """The streams of all jobs, published together. `on_event` sees each event as it comes."""

    async def read(job: dict[str, Any]) -> list[Event]:
        name = f"chaos-{next(_numbers)}"
        await submit_job(bus, "default", MODEL, Lane.INTERACTIVE, encode({**job, "id": name}))
        events = []
        async for event in follow(bus, "default", name, SILENCE_S):
            on_event(event)
            events.append(event)
        return events

    return list(await asyncio.gather(*(read(job) for job in jobs)))


def essence(events: list[Event]) -> list[Event]:
    """Tokens and finishes by choice, after checking the form: one start, one end, no index missing or twice."""
    assert sum(isinstance(event, Start) for event in events) == 1
    assert isinstance(events[-1], Done), events[-1]
    kept = [event for event in events if isinstance(event, (Token, Finish))]
    choices = {event.choice for event in kept}
    for choice in choices:
        indexes = [event.index for event in kept if isinstance(event, Token) and event.choice == choice]
        assert indexes == list(range(len(indexes)))
        assert sum(isinstance(event, Finish) for event in kept if event.choice == choice) == 1
    return sorted(kept, key=lambda event: event.choice)
