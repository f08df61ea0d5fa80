"""The jobs of a chaos run: few distinct ones, each run many times and always the same."""

import random
from dataclasses import dataclass
from typing import Any, Literal

from tests.golden.passages import PASSAGES, SYSTEM

Way = Literal["nats", "nats late", "sse", "http"]
# Mostly short, some long; each exactly as many tokens as it says.
MAX_TOKENS = [64, 72, 80, 65, 96, 64, 127, 66, 64, 100, 80, 128, 64, 70, 90, 64, 110, 64, 129, 76, 192, 64, 320, 512]
SHARED_SALTS = 4  # so many different salts for jobs that find each other's blocks
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"seed": 3, "n": 2},
    {"seed": 4, "repetition_penalty": 1.2, "stop": ["\n\n\n\n"]},
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 5, "top_k": 40, "min_p": 0.05},
]
QUESTIONS = [
    "Write one sentence about rain.",
    "Repeat exactly this text: 👋🏽 日本語 🎉",
    "When does the library open?",
]
WAYS: list[Way] = ["nats", "nats", "nats late", "nats late", "sse", "sse", "http"]


@dataclass(frozen=True)
class Kind:
    """One distinct job; `fields` are the job's own."""

    number: int
    fields: dict[str, Any]

    @property
    def has_logprobs(self) -> bool:
        return "logprobs" in self.fields

    @property
    def num_tokens(self) -> int:
        return int(self.fields["max_tokens"]) * int(self.fields.get("n", 1))


def kinds(count: int) -> list[Kind]:
    return [Kind(number, _fields(number)) for number in range(count)]


def _fields(number: int) -> dict[str, Any]:
    """Every third is a chat behind the same system turn; the others are raw prompts of 60 to 190 tokens."""
    fields = {**SAMPLINGS[number % len(SAMPLINGS)], "max_tokens": MAX_TOKENS[number], "ignore_eos": True}
    if "seed" in fields:
        fields["seed"] += 100 * number
    if number % 3 == 2:
        turns = [("system", SYSTEM), ("user", QUESTIONS[number // 3 % len(QUESTIONS)])]
        return {**fields, "messages": [{"role": role, "content": content} for role, content in turns]}
    return {**fields, "prompt": PASSAGES[number % len(PASSAGES)][: 260 + 53 * (number % 10)]}


@dataclass(frozen=True)
class Order:
    """One job to be run: which kind, under which salt, and how its client asks and reads."""

    number: int
    kind: Kind
    salt: str
    way: Way


def order(number: int, among: list[Kind], rng: random.Random) -> Order:
    """Two of three jobs have a salt of their own, so that no stored block makes them trivial; the others share.

    Each kind makes about as many tokens as the others in the end, so that long ones are rare.
    """
    (kind,) = rng.choices(among, weights=[1 / kind.num_tokens for kind in among])
    salt = f"own-{number}" if rng.random() < 0.66 else f"shared-{rng.randrange(SHARED_SALTS)}"
    way = rng.choice(WAYS)
    return Order(number, kind, salt, "nats" if kind.has_logprobs and way in ("sse", "http") else way)
