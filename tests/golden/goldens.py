"""The frozen prompts and what `transformers` continues them with; see `make_goldens`."""

import json
from pathlib import Path
from typing import Any

import msgspec


class Golden(msgspec.Struct, frozen=True):
    """64 greedy tokens in float32; `min_gap` is the least distance between the best two logits along them."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    min_gap: float

    def job(self, **changes: Any) -> dict[str, Any]:
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "max_tokens": len(self.token_ids),
            "temperature": 0.0,
            "ignore_eos": True,
            **changes,
        }


def _load() -> dict[str, Golden]:
    document = json.loads(Path(__file__).with_name("greedy_float32.json").read_text("utf-8"))
    return {golden.name: golden for golden in msgspec.convert(document["goldens"], list[Golden])}


GOLDENS = _load()
