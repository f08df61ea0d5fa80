"""What a hand-off must say before a decode worker computes anything from it."""

import json

import pytest

from schemas.errors import InvalidRequest
from schemas.handoff import parse_handoff

GOOD = {
    "tenant": "default",
    "job": "j",
    "origin": "1-1",
    "digest": "d",
    "build": "b",
    "hop": 1,
    "last": 1,
    "timeout_left_s": 1.0,
    "prompt_token_ids": [1],
    "sampling": {"seed": 1, "max_tokens": 2, "n": 2},
    "first": [{"choice": 1, "id": 5}],
    "stored_blocks": 1,
    "cached_tokens": 0,
}


def test_a_resolved_hand_off_is_read():
    assert parse_handoff(json.dumps(GOOD).encode()).first[0].id == 5


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"sampling": {"max_tokens": 2}}, "sampling"),
        ({"sampling": {"seed": 1}}, "sampling"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"first": [{"choice": 2, "id": 5}]}, "first"),
        ({"first": [{"choice": -1, "id": 5}]}, "first"),
    ],
)
def test_an_unresolved_one_is_refused_by_name(change: dict, param: str):
    with pytest.raises(InvalidRequest) as refused:
        parse_handoff(json.dumps(GOOD | change).encode())
    assert refused.value.param == param
