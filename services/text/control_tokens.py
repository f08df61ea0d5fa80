"""Tells the control tokens that a template wrote from those that somebody typed (CASES 35)."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemas.errors import InvalidRequest

# Noncharacters: valid in UTF-8, never assigned, no whitespace, no case. The last one of the block frames stand-ins.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDEF)]


class GuardedText(msgspec.Struct, frozen=True):
    """A text in which guard characters stand for others: `guards` tells for which. Often there are none."""

    text: str
    guards: dict[str, str] = {}

    def unguarded(self, text: str | None = None) -> str:
        """The text (or what was made of it) with every guard swapped back."""
        text = self.text if text is None else text
        for guard, char in self.guards.items():
            text = text.replace(guard, char)
        return text


class ControlTokens:
    """The texts of a tokenizer's control tokens, with their ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self.id_set = frozenset(ids.values())
        self._beginnings = frozenset(token[:size] for token in ids for size in range(1, len(token)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        # Longest first, as the tokenizer matches: leftmost, then longest.
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else re.compile(r"(?!)")

    def guard(self, strings: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """User strings in which the first character of every control token is swapped for a *guard* character, and
        what each guard stands for; ({}, unchanged strings) for harmless ones.

        A token that a string's end leaves unfinished is guarded too, since what follows might complete it. A guard
        survives whatever a template does to a string: trim, join, slice, compare lengths.
        Raises `InvalidRequest` if the strings use up all guard characters.
        """
        starts = [self._starts(string) for string in strings]
        opening = sorted({string[i] for string, found in zip(strings, starts, strict=True) for i in found})
        if not opening:
            return list(strings), {}
        present = set("".join(strings))
        unused = [char for char in _GUARDS if char not in present]
        if len(unused) < len(opening):
            raise InvalidRequest("cannot tell control tokens in the messages from the template's: remove them")
        guard_of = dict(zip(opening, unused, strict=False))
        guarded = [_swap(string, found, guard_of) for string, found in zip(strings, starts, strict=True)]
        return guarded, {guard: char for char, guard in guard_of.items()}

    def replace(self, text: str, stand_ins: Mapping[str, str]) -> tuple[str, int]:
        """`text` with each control token swapped for its stand-in, and how many there were."""
        return self._pattern.subn(lambda found: stand_ins[found.group()], text)

    def _starts(self, string: str) -> set[int]:
        starts = set()
        at = self._pattern.search(string)
        while at:  # overlapping ones too: guarding one must not uncover the next
            starts.add(at.start())
            at = self._pattern.search(string, at.start() + 1)
        return starts | set(self._unfinished(string.rstrip()))

    def _unfinished(self, string: str) -> Iterable[int]:
        """Where a proper beginning of a control token runs up to the end of `string`."""
        for start in range(max(0, len(string) - self._longest_beginning), len(string)):
            if string[start:] in self._beginnings:
                yield start


def _swap(string: str, positions: set[int], guard_of: Mapping[str, str]) -> str:
    chars = list(string)
    for position in positions:
        chars[position] = guard_of[chars[position]]
    return "".join(chars)
