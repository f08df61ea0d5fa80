"""Incremental text equals the text of all ids, for every kind of tokenizer (CASES 29, 30)."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.text.detokenizer import Detokenizer
from services.text.model import TextModel
from services.text.tokenizer import Tokenizer

STRINGS = [
    "👋🏽 日本語 🎉",
    "👨‍👩‍👧‍👦 and 🏳️‍🌈 and 🇩🇪",
    "composed é, decomposed e\u0301",
    "  .  two spaces\t\ttabs \r\n\r\n ,",
    "zero\u200bwidth\u200djoiners\ufeff",
    "\ufffd\ufffd",
    "中文、한국어、العربية、עברית, नमस्ते",
    "a \x00 b",
]
ALPHABET = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W", "XY", "Z"]


def run(tokenizer: Tokenizer, ids: list[int], stops: list[str] | None = None) -> tuple[list[str], str | None]:
    """The released pieces, with the finish, up to the stop that matched if one did."""
    detokenizer = Detokenizer(tokenizer, stops or [])
    pieces = []
    for id_ in ids:
        text, stop = detokenizer.push(id_)
        pieces.append(text)
        if stop is not None:
            assert detokenizer.finish() == ""
            return pieces, stop
    return [*pieces, detokenizer.finish()], None


def expected(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, str | None]:
    """Decoding everything again after every token."""
    for end in range(1, len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        settled = "".join(detokenizer.push(id_)[0] for id_ in ids[:end])
        starts = {settled.find(stop): stop for stop in sorted(stops, key=len, reverse=True)}
        starts.pop(-1, None)
        if starts:
            return settled[: min(starts)], starts[min(starts)]
    whole = tokenizer.decode(ids)
    cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    return whole[:cut], None


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_ids_give_the_text_of_all_ids(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 5), max_size=30))
    pieces, _ = run(any_tokenizer, ids)
    assert "".join(pieces) == any_tokenizer.decode(ids)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*range(17, 260), 0, 1, 2, 504]), max_size=30))
@example([172, 241, 225])
def test_broken_characters_give_the_text_of_all_ids(text: TextModel, ids: list[int]) -> None:
    """Mostly tokens of one byte: every way to break UTF-8, with control tokens in the middle of characters."""
    pieces, _ = run(text.tokenizer, ids)
    assert "".join(pieces) == text.tokenizer.decode(ids)


@pytest.mark.parametrize("string", STRINGS)
def test_no_replacement_character_in_whole_text(any_tokenizer: Tokenizer, string: str) -> None:
    ids = any_tokenizer.encode(string)
    pieces, _ = run(any_tokenizer, ids)
    assert "".join(pieces) == any_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in string


def test_an_unfinished_character_is_one_replacement_character_at_the_end(text: TextModel) -> None:
    ids = text.tokenizer.encode("🎉🎉")
    assert len(ids) == 6
    pieces, _ = run(text.tokenizer, ids[:-1])
    assert (pieces[:-1], pieces[-1]) == (["", "", "🎉", "", ""], "\ufffd")


def test_control_and_end_tokens_release_nothing(text: TextModel) -> None:
    pieces, _ = run(text.tokenizer, [1, 504, 2, 5249, 0])
    assert pieces == ["", "The", "", " rain", "", ""]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_stops_cut_the_text_and_never_leak(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    fragments = st.sampled_from(["a", "b", "ab", " ", "é", "🎉", "the", "<s>", "e\u0301"])
    string = data.draw(st.lists(fragments, max_size=12).map("".join))
    stops = data.draw(st.lists(st.lists(fragments, min_size=1, max_size=3).map("".join), min_size=1, max_size=3))
    ids = any_tokenizer.encode(string)
    pieces, stop = run(any_tokenizer, ids, stops)
    assert ("".join(pieces), stop) == expected(any_tokenizer, ids, stops)
    for given_stop in stops:
        assert given_stop not in "".join(pieces)


@pytest.mark.parametrize(
    ("stops", "wanted", "matched", "num_tokens"),
    [
        (["DEFGHIJ"], "", "DEFGHIJ", 4),
        (["M"], "DEFGHIJKL", "M", 6),
        (["XYZ", "HIJ"], "DEFG", "HIJ", 4),
        (["LMN", "M"], "DEFGHIJKL", "M", 6),
        (["KLMX"], "DEFGHIJKLMNOPQRSTUVWXYZ", None, 14),
    ],
)
def test_the_alphabet(text: TextModel, stops: list[str], wanted: str, matched: str | None, num_tokens: int) -> None:
    """CASES 29. The tokens after the match are never needed."""
    ids = [id_ for part in ALPHABET for id_ in text.tokenizer.encode(part)]
    assert len(ids) == len(ALPHABET)
    pieces, stop = run(text.tokenizer, ids, stops)
    assert ("".join(pieces), stop) == (wanted, matched)
    assert len(pieces) == num_tokens + (stop is None)


def test_what_might_become_a_stop_is_held_back_and_then_released(text: TextModel) -> None:
    ids = [id_ for part in ("DEF", "GH", "I") for id_ in text.tokenizer.encode(part)]
    assert run(text.tokenizer, ids, ["EFGX"])[0] == ["D", "EFGH", "I", ""]


def test_a_stop_in_what_the_end_releases_does_not_leak(text: TextModel) -> None:
    ids = text.tokenizer.encode("x🎉")[:-1]
    assert run(text.tokenizer, ids, ["\ufffd"]) == (["x", "", "", ""], None)


def test_state_is_rebuilt_from_ids(text: TextModel) -> None:
    """A take-over in the middle of a character."""
    ids = text.tokenizer.encode("Hello 👋🏽!")
    for cut in range(len(ids)):
        first, second = Detokenizer(text.tokenizer, ["!?"]), Detokenizer(text.tokenizer, ["!?"])
        before = "".join(first.push(id_)[0] for id_ in ids[:cut])
        assert before == "".join(second.push(id_)[0] for id_ in ids[:cut])
        rest = "".join(second.push(id_)[0] for id_ in ids[cut:]) + second.finish()
        assert before + rest == "Hello 👋🏽!"
