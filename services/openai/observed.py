"""An OpenAI answer as far as two servers' answers to one request are compared: its texts, its ends, its length."""

import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Observed:
    """By choice. Times are seconds from `began_s` on; `first_s` is None where all came at once. `error`: a code."""

    began_s: float = field(default_factory=time.monotonic)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_tokens: int | None = None
    first_s: float | None = None
    total_s: float = 0.0
    error: str = ""

    def end(self, error: str = "") -> "Observed":
        self.total_s = time.monotonic() - self.began_s
        self.error = self.error or error
        return self

    def note_text(self, index: int, text: str) -> None:
        self.texts[index] = self.texts.get(index, "") + text

    def difference(self, other: "Observed") -> tuple[int, int] | None:
        """(choice, character) where the texts part, None if they and the ends are the same."""
        for index in sorted(self.texts.keys() | other.texts.keys()):
            ours, theirs = self.texts.get(index, ""), other.texts.get(index, "")
            if ours != theirs or self.reasons.get(index) != other.reasons.get(index):
                parted = (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
                return index, next(parted, min(len(ours), len(theirs)))
        return None


class Reading:
    """Reads a server's answer as it comes: a stream in parts, or the whole body. What is none is an error, too."""

    def __init__(self) -> None:
        self.observed = Observed()
        self._has_end = False
        self._rest = b""

    @property
    def is_whole(self) -> bool:
        """Whether a stream has come to an end of its own: [DONE], an error, or the end of each choice, with which
        some servers leave it."""
        found = self.observed
        return self._has_end or (bool(found.reasons) and found.reasons.keys() >= found.texts.keys())

    def add_part(self, part: bytes) -> None:
        """Of a stream, cut anywhere."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._line(line)

    def end_stream(self) -> None:
        """No part will follow: the last line may lack its end."""
        self._line(self._rest)
        self._rest = b""

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        if (data := line[5:].strip()) == b"[DONE]":
            self._has_end = True
        else:
            self._take(data, time.monotonic())

    def add_whole(self, body: bytes) -> None:
        self._take(body, None)

    def _take(self, data: bytes, came_s: float | None) -> None:
        try:
            found = json.loads(data)
            if error := found.get("error"):
                self._has_end = True
                self.observed.error = str(error.get("code") or error.get("type") or "error")
            for choice in found.get("choices", ()):
                self._choice(choice, came_s)
            if usage := found.get("usage"):
                self.observed.num_tokens = usage.get("completion_tokens")
        except (ValueError, AttributeError, LookupError, TypeError):
            self.observed.error = "unreadable"

    def _choice(self, choice: dict[str, Any], came_s: float | None) -> None:
        index = choice["index"]
        said = choice.get("delta") or choice.get("message") or choice
        text = said.get("content") or said.get("text") or ""
        if text and came_s is not None and self.observed.first_s is None:
            self.observed.first_s = came_s - self.observed.began_s
        self.observed.note_text(index, text)
        if reason := choice.get("finish_reason"):
            self.observed.reasons[index] = reason
