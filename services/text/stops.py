"""Finds stop strings in a text that arrives in pieces, and says how much of it might be the beginning of one."""

import functools
from collections.abc import Sequence


@functools.lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """`borders[i]`: length of the longest proper prefix of `stop[:i+1]` that also ends it (Knuth-Morris-Pratt)."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[i] == stop[matched]
        borders[i] = matched
    return tuple(borders)


class StopScanner:
    """Feeds every character once to one automaton a stop string: constant work a character and stop, no rescans."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)

    def scan(self, text: str) -> tuple[int, str] | None:
        """(offset from the start of `text`, stop) of the match that starts first, or None.

        The offset is negative when the match began in earlier text. Of matches with one start the shorter counts.
        Useless after a match.
        """
        found: tuple[int, int, str] | None = None
        for index, (stop, borders) in enumerate(self._stops):
            end = self._advance(index, stop, borders, text)
            if end is not None:
                match = (end - len(stop), len(stop), stop)
                found = match if found is None else min(found, match)
        return None if found is None else (found[0], found[2])

    @property
    def held(self) -> int:
        """How many of the last characters may belong to a stop string that is not complete yet."""
        return max(self._matched, default=0)

    def _advance(self, index: int, stop: str, borders: tuple[int, ...], text: str) -> int | None:
        matched = self._matched[index]
        for position, char in enumerate(text):
            while matched and char != stop[matched]:
                matched = borders[matched - 1]
            matched += char == stop[matched]
            if matched == len(stop):
                return position + 1
        self._matched[index] = matched
        return None
