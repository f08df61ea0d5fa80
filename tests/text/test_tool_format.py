"""Calls are read the same however the text is cut, and what is no call stays text."""

import random

import pytest

from services.text.tool_format import Call, CallReader

ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "now"}</tool_call>\n'
DEEP = '<tool_call>{"name": "x", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"
NOT_JSON = '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>'
NO_OBJECT = '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'
WEATHER = Call("weather", '{"city": "Paris"}')


def read(text: str, chance: random.Random) -> tuple[str, list[Call]]:
    reader, found, calls = CallReader(), "", list[Call]()
    while text:
        size = chance.randint(1, 9)
        piece = reader.push(text[:size])
        found, calls, text = found + piece.text, calls + piece.calls, text[size:]
    return found + reader.finish(), calls


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ("Hello <b>there</b>", "Hello <b>there</b>", []),
        (ONE, "", [WEATHER]),
        ("I will look.\n" + TWO, "I will look.\n", [WEATHER, Call("now", "{}")]),
        ("a < b <tool <tool_call", "a < b <tool <tool_call", []),
        ("<tool_call>{broken</tool_call> after", "<tool_call>{broken</tool_call> after", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (NO_OBJECT, NO_OBJECT, []),
        (DEEP, DEEP, []),
        (NOT_JSON, NOT_JSON, []),
        ('cut <tool_call>{"name": "x"', 'cut <tool_call>{"name": "x"', []),
        (ONE + " done", " done", [WEATHER]),
    ],
)  # fmt: skip
def test_calls_and_text(text: str, left: str, calls: list[Call]) -> None:
    for seed in range(20):
        assert read(text, random.Random(seed)) == (left, calls)
