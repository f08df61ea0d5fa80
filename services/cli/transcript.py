"""What a person sees of a job: its text as it comes, and what it cost."""

import time
from typing import TextIO

from schemas.errors import error_from_code
from schemas.events import Done, Error, Event, Finish, Start, Token, Usage


class Transcript:
    """Writes the text to `out`. One answer is streamed; of several, each is written whole when it is finished."""

    def __init__(self, out: TextIO, num_choices: int = 1) -> None:
        self.usage = Usage(prompt_tokens=0, completion_tokens=0)
        self.reason = ""
        self._out = out
        self._texts = [""] * num_choices
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._asked_s

    @property
    def text(self) -> str:
        """Of the first answer, so far."""
        return self._texts[0]

    @property
    def ttft_s(self) -> float:
        """Seconds from making this object to the first token; 0 before it."""
        return self._first_s - self._asked_s if self._first_s is not None else 0.0

    def take(self, event: Event) -> None:
        """Raises the error that an `error` event describes."""
        match event:
            case Start():
                self.usage = Usage(
                    prompt_tokens=event.prompt_tokens, completion_tokens=0, cached_tokens=event.cached_tokens
                )
            case Token():
                self._last_s = time.monotonic()
                self._first_s = self._first_s or self._last_s
                self._add(event.choice, event.text)
            case Finish():
                self._add(event.choice, event.text)
                self._finish(event)
            case Done():
                self.usage = event.usage
            case Error():
                raise error_from_code(event.code, event.message, event.param)

    def summary(self) -> str:
        """`37 prompt tokens (0 cached), 8 tokens, first after 0.09 s, then 85 tokens/s`"""
        usage = self.usage
        parts = [
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
            f"{usage.completion_tokens} tokens ({self.reason})",
            f"first after {self.ttft_s:.3f} s",
        ]
        took_s = self._last_s - (self._first_s or self._last_s)
        if took_s > 0:
            parts.append(f"then {(usage.completion_tokens - len(self._texts)) / took_s:.1f} tokens/s")
        return ", ".join(parts)

    def _add(self, choice: int, text: str) -> None:
        self._texts[choice] += text
        if len(self._texts) == 1:
            self._out.write(text)
            self._out.flush()

    def _finish(self, event: Finish) -> None:
        self.reason = event.reason
        text = "" if len(self._texts) == 1 else f"[{event.choice}] {self._texts[event.choice]}"
        self._out.write(text + "\n")
        self._out.flush()
