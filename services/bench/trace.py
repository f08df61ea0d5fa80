"""Traces of requests as chains of block ids: read from a file, or made up.

The file has one JSON object a line, as published with the Mooncake paper: `timestamp` in ms and `hash_ids`, one id for
each block of the prompt; equal ids mean an equal prefix up to there. Other fields are ignored.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schemas.errors import SetupError


class Request(msgspec.Struct, frozen=True):
    at_s: float
    blocks: list[int]


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]


def read_trace(path: Path) -> list[Request]:
    """Requests with equal timestamps (traces come in bins) are spread evenly until the next. Raises `SetupError`."""
    decoder = msgspec.json.Decoder(_Line)
    lines = []
    try:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            if text.strip():
                lines.append(_line(decoder, text, f"{path}:{number}"))
    except OSError as error:
        raise SetupError(f"the trace {path} cannot be read: {error.strerror}", param="--trace") from error
    if not lines:
        raise SetupError(f"the trace {path} has no requests", param="--trace")
    return list(_spread(lines))


def _line(decoder: "msgspec.json.Decoder[_Line]", text: bytes, where: str) -> _Line:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise SetupError(f"{where} is no request with timestamp and hash_ids: {error}", param="--trace") from error


def _spread(lines: list[_Line]) -> Iterator[Request]:
    bins = [(at, list(group)) for at, group in itertools.groupby(lines, key=lambda line: line.timestamp)]
    for (at_ms, group), following in itertools.zip_longest(bins, bins[1:]):
        width_ms = max(0.0, following[0] - at_ms) if following else 0.0
        for number, line in enumerate(group):
            yield Request((at_ms + width_ms * number / len(group)) / 1000, line.hash_ids)


def made_up_trace(num_requests: int, seed: int = 0) -> list[Request]:
    """Conversations that begin with one of a few system prompts and grow by a turn each time; most end soon."""
    rng = random.Random(seed)
    ids = itertools.count()
    systems = [[next(ids) for _ in range(rng.randint(1, 6))] for _ in range(40)]
    alive: list[list[int]] = []
    requests = []
    for number in range(num_requests):
        if alive and rng.random() < 0.4:
            turns_between = 20 + int(rng.expovariate(1 / 60))  # nobody answers before he was answered
            chat = alive.pop(max(0, len(alive) - 1 - turns_between))
        else:
            chat = list(systems[int(len(systems) * rng.random() ** 3)])
        chat = chat + [next(ids) for _ in range(1 + int(rng.expovariate(1 / 8)))]
        requests.append(Request(0.3 * number, chat))
        if rng.random() < 0.5:
            alive.append(chat)
    return requests
