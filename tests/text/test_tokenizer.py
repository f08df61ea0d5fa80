"""Ids and texts against `transformers` and the facts of the default model."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, SetupError
from services.text.control_tokens import GuardedText
from services.text.model import TextModel
from services.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level, sentencepiece_like

FACTS = {
    "": [],
    "Once upon a time": [6403, 1980, 253, 655],
    "Rules: be brief. Go": [42976, 42, 325, 5453, 30, 2351],
    " " * 64: [40686],
    "\u00e9": [2756],
    "e\u0301": [85, 151, 219],
    "\r\n": [2738],
    "\ufeffa": [186, 136, 140, 81],
}
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_",
    "end|>",
    "<",
    "|>",
    " ",
    "\n",
    "  ",
    "a",
    "1",
    "é",
    "👋🏽",
]
# Not in this vocabulary, which drops them: six control characters, and planes that Unicode has not assigned.
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
characters = st.characters(exclude_characters=UNKNOWN, exclude_categories=["Cs", "Cn"])
mixed_text = st.lists(st.sampled_from(PIECES) | st.text(characters, max_size=8), max_size=12).map("".join)


@pytest.mark.parametrize(("given_text", "ids"), FACTS.items())
def test_facts(text: TextModel, given_text: str, ids: list[int]) -> None:
    assert text.tokenizer.encode(given_text) == ids


@settings(deadline=None)
@given(mixed_text)
def test_parsing_equals_transformers(text: TextModel, oracle: Any, string: str) -> None:
    assert text.tokenizer.encode_prompt(string) == oracle(string)["input_ids"]
    assert text.tokenizer.encode(string, special=True) == oracle(string, add_special_tokens=False)["input_ids"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=20))
def test_decoding_equals_transformers(text: TextModel, oracle: Any, ids: list[int]) -> None:
    for skip in (True, False):
        wanted = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert text.tokenizer.decode(ids, skip_special=skip) == wanted


@settings(deadline=None)
@given(mixed_text)
def test_control_tokens_are_plain_text_unless_asked_for(text: TextModel, string: str) -> None:
    ids = text.tokenizer.encode(string)
    assert not text.tokenizer.control.id_set & set(ids)
    assert text.tokenizer.decode(ids, skip_special=False) == string


@settings(deadline=None)
@given(mixed_text, st.data())
def test_a_guarded_character_changes_no_ids_but_those_of_control_tokens(
    any_tokenizer: Tokenizer, string: str, data: st.DataObject
) -> None:
    """The pass with stand-ins sees the same seams as the usual pass: guard something harmless and compare."""
    guard, char = "\ufdd0", data.draw(st.sampled_from(sorted(set(string) - set("<|>")) or ["a"]))
    if guard in string:
        return
    guarded = GuardedText(string.replace(char, guard), {guard: char})
    if any(char in token for token in any_tokenizer.control.ids):
        return
    assert any_tokenizer.encode_guarded(guarded) == any_tokenizer.encode(string, special=True)


@settings(deadline=None)
@given(mixed_text)
def test_the_floor_is_never_above_the_number_of_tokens(any_tokenizer: Tokenizer, string: str) -> None:
    for special in (True, False):
        assert any_tokenizer.min_tokens(string) <= len(any_tokenizer.encode(string, special=special))


@pytest.mark.parametrize("unit", [" ", "=", "-", "\n", "<|im_end|>", "a", "漢"])
def test_the_floor_of_long_runs_is_sound(text: TextModel, unit: str) -> None:
    string = unit * 20_000
    assert text.tokenizer.min_tokens(string) <= len(text.tokenizer.encode(string, special=True))


def test_spaces_that_a_control_token_swallows_are_not_counted() -> None:
    tokenizer = Tokenizer(byte_level())
    string = "<|turn|>" + " " * 10_000 + "\u3000x"
    assert tokenizer.min_tokens(string) <= len(tokenizer.encode(string, special=True)) == 2


def test_token_bytes_joined_are_the_text(text: TextModel) -> None:
    ids = text.tokenizer.encode("Grüße, 👋🏽 日本語 🎉\t\r\n  .")
    assert b"".join(map(text.tokenizer.token_bytes, ids)).decode() == "Grüße, 👋🏽 日本語 🎉\t\r\n  ."
    assert text.tokenizer.token_bytes(10_000_000) == b""


def test_token_bytes_of_a_sentencepiece_vocabulary() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    ids = tokenizer.encode("the 日 fox")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " the 日 fox"


def test_added_tokens_that_are_not_in_the_byte_alphabet_are_their_own_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert [tokenizer.token_bytes(id_) for id_ in tokenizer.encode("<think>", special=True)] == [b"<think>"]


def test_characters_that_the_vocabulary_lacks_are_dropped_as_transformers_does(text: TextModel, oracle: Any) -> None:
    string = f"a{UNKNOWN}b\x00\U000401ff"
    assert text.tokenizer.encode(string) == oracle(string)["input_ids"]
    assert text.tokenizer.encode(UNKNOWN) == []


@pytest.mark.parametrize("broken", ["\ud83d", "a\udc4b\ud83d"])
def test_lone_surrogates_are_refused(text: TextModel, broken: str) -> None:
    for encode in (text.tokenizer.encode, text.tokenizer.encode_prompt, text.tokenizer.min_tokens):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            encode(broken)


def test_text_that_merges_into_a_control_token_is_refused() -> None:
    """Some vocabularies can spell a control token with ordinary merges: then nobody can tell where it came from."""
    source = json.loads(byte_level())
    vocabulary = source["model"]["vocab"]
    vocabulary |= {"~~": 2000, "~~~~": 2001}
    source["model"]["merges"] += [["~", "~"], ["~~", "~~"]]
    source["added_tokens"].append(source["added_tokens"][0] | {"id": 2001, "content": "~~~~"})
    tokenizer = Tokenizer(json.dumps(source))
    assert tokenizer.encode("~~~~", special=True) == [2001]
    with pytest.raises(InvalidRequest, match="spells a control token"):
        tokenizer.encode("~~~~")


@pytest.mark.parametrize("source", ["", "{}", "[1]", '{"version": "1.0"}', "\x00"])
def test_a_broken_file_is_a_setup_error(source: str) -> None:
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        Tokenizer(source)
