"""What a model is known to answer: made once by `transformers` in float32 (`tests/model/make_golden.py`)."""

from importlib import resources

import msgspec

FOLDER = "goldens"


class GoldenPrompt(msgspec.Struct, frozen=True):
    """`tokens`: the greedy answer to `ids`. `logits[i]`: those of `logit_ids[i]` where `tokens[i]` is chosen."""

    ids: list[int]
    tokens: list[int]
    logit_ids: list[list[int]]
    logits: list[list[float]]


class Golden(msgspec.Struct, frozen=True):
    model: str
    made_with: str
    prompts: list[GoldenPrompt]


def load_golden(fingerprint: bytes) -> Golden | None:
    """The golden of the model with this fingerprint; None if nobody has made one."""
    file = resources.files(__package__) / FOLDER / f"{fingerprint.hex()}.json"
    return msgspec.json.decode(file.read_bytes(), type=Golden) if file.is_file() else None
