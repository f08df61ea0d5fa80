"""How a model's chat template writes tools and calls, and how calls are read back out of a text.

One format is known: Hermes', which Qwen's models write too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
from typing import NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Read(NamedTuple):
    text: str
    calls: list[Call]


class CallReader:
    """Tells a choice's calls from its text, piece by piece: what may become a call is held back until it is one."""

    def __init__(self) -> None:
        self._held = ""
        self._blanks: str | None = None  # since the last call, while nothing else has come

    def push(self, piece: str) -> Read:
        self._held += piece
        text, calls = "", list[Call]()
        while True:
            at = self._held.find(OPENING)
            if at < 0:
                kept = _beginning(self._held)
                text += self._outside(self._held[: len(self._held) - kept])
                self._held = self._held[len(self._held) - kept :]
                return Read(text, calls)
            end = self._held.find(CLOSING, at)
            text += self._outside(self._held[:at])
            self._held = self._held[at:]
            if end < 0:
                return Read(text, calls)
            end += len(CLOSING) - at
            written, self._held = self._held[:end], self._held[end:]
            call = _parsed(written[len(OPENING) : -len(CLOSING)])
            if call is None:
                text += written
            else:
                calls.append(call)
                self._blanks = ""

    def finish(self) -> str:
        """What was still held back: a call that does not end is text."""
        held, self._held = self._held, ""
        return self._outside(held)

    def _outside(self, text: str) -> str:
        """Blanks between calls are the format's."""
        if self._blanks is None:
            return text
        self._blanks += text
        if not self._blanks.strip():
            return ""
        text, self._blanks = self._blanks, None
        return text


def _beginning(text: str) -> int:
    """How many of the last characters may begin an `OPENING`."""
    return next((n for n in range(min(len(text), len(OPENING) - 1), 0, -1) if OPENING.startswith(text[-n:])), 0)


def _parsed(written: str) -> Call | None:
    try:
        value = json.loads(written, parse_constant=_refused)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):  # nested beyond reason is no call either
        return None


def _refused(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)
