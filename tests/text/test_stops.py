"""The stop scanner against plain searching."""

from hypothesis import given
from hypothesis import strategies as st

from services.text.stops import StopScanner

words = st.text("ab", min_size=1, max_size=5)


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=10))
def test_equals_searching_after_every_piece(stops: list[str], pieces: list[str]) -> None:
    scanner = StopScanner(stops)
    seen = ""
    for piece in pieces:
        found = scanner.scan(piece)
        starts = {(seen + piece).find(stop): stop for stop in sorted(stops, key=len, reverse=True)}
        starts.pop(-1, None)
        if starts:
            start = min(starts)
            assert found == (start - len(seen), starts[start])
            return
        assert found is None
        seen += piece
        tails = [seen[i:] for i in range(len(seen) + 1)]
        assert scanner.held == max(len(tail) for tail in tails if any(stop.startswith(tail) for stop in stops))


def test_work_does_not_depend_on_the_length_of_a_stop() -> None:
    scanner = StopScanner(["a" * 1023 + "b"] * 16)
    for _ in range(2000):
        assert scanner.scan("a") is None
    assert scanner.held == 1023
    assert scanner.scan("b") == (-1023, "a" * 1023 + "b")
