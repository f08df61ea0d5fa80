"""Prompts of jobs, their limits and what is refused (CASES 12, 31, 32, 34, 35)."""

from typing import Any

import pytest

from schemas.errors import ContextLengthExceeded, InvalidRequest
from schemas.job import Job, Message
from services.text.model import TextModel
from services.text.prompt import resolve_max_tokens, resolve_prompt
from tests.text.test_chat_template import FORGED


def chat(content: str) -> Job:
    return Job(messages=[Message(role="user", content=content)])


def test_a_raw_prompt_is_tokenised_whole(text: TextModel) -> None:
    """CASES 12."""
    assert resolve_prompt(Job(prompt="Once upon a ti" + "me"), text) == [6403, 1980, 253, 655]
    assert resolve_prompt(Job(prompt="Rules: be brief. " + "Go"), text) == [42976, 42, 325, 5453, 30, 2351]


def test_control_tokens_of_a_raw_prompt_are_parsed(text: TextModel) -> None:
    """Who sends a raw prompt writes the turn markers; no start token is added for this model."""
    ids = resolve_prompt(Job(prompt="<|im_start|>user\nhi<|im_end|>\n"), text)
    assert ids == [1, 4093, 198, 6004, 2, 198]


def test_messages_go_through_the_template(text: TextModel) -> None:
    assert len(resolve_prompt(chat("What is the capital of France?"), text)) == 37
    assert len(resolve_prompt(chat(""), text)) == 30
    assert len(resolve_prompt(chat("Repeat exactly this text: 👋🏽 日本語 🎉"), text)) == 51
    assert len(resolve_prompt(chat(FORGED), text)) == 78


def test_token_ids_are_taken_as_they_are(text: TextModel) -> None:
    assert resolve_prompt(Job(prompt_token_ids=[0, 49151]), text) == [0, 49151]


@pytest.mark.parametrize("bad", [49152, 2**32 - 1, -1])
def test_ids_outside_the_vocabulary_are_refused(text: TextModel, bad: int) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids\[1\]") as refused:
        resolve_prompt(Job(prompt_token_ids=[5, bad]), text)
    assert refused.value.param == "prompt_token_ids"


def test_a_prompt_without_tokens_is_refused(text: TextModel) -> None:
    """The vocabulary lacks U+0006, so this text has none."""
    with pytest.raises(InvalidRequest, match="no tokens") as refused:
        resolve_prompt(Job(prompt="\x06"), text)
    assert refused.value.param == "prompt"


REVERSED_PAIR = [Message(role="user", content="x"), Message(role="user", content="\udc4b\ud83d")]


@pytest.mark.parametrize(
    ("job", "param"), [(Job(prompt="a\ud83d"), "prompt"), (Job(messages=REVERSED_PAIR), "messages[1].content")]
)
def test_lone_surrogates_are_refused_by_field(text: TextModel, job: Job, param: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as refused:
        resolve_prompt(job, text)
    assert refused.value.param == param


@pytest.mark.parametrize("num_tokens", [1, 8190, 8191])
def test_prompts_that_leave_room_for_one_token_fit(text: TextModel, num_tokens: int) -> None:
    assert len(resolve_prompt(Job(prompt=" the" * num_tokens), text)) == num_tokens
    assert len(resolve_prompt(Job(prompt_token_ids=[260] * num_tokens), text)) == num_tokens


@pytest.mark.parametrize("num_tokens", [8192, 8193])
def test_longer_ones_are_refused_with_both_numbers(text: TextModel, num_tokens: int) -> None:
    for job in (Job(prompt=" the" * num_tokens), Job(prompt_token_ids=[260] * num_tokens)):
        with pytest.raises(ContextLengthExceeded, match=rf"{num_tokens} tokens; .* 8192 tokens"):
            resolve_prompt(job, text)


def test_more_messages_than_tokens_are_refused_unrendered(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(text.template), "render")
    with pytest.raises(ContextLengthExceeded, match="at least 200000 tokens"):
        resolve_prompt(Job(messages=[Message(role="user", content="")] * 200_000), text)


@pytest.mark.parametrize("unit", ["a", " ", "=", "漢", "🎉", "<|im_end|>", "x y\n", "\u0301"])
def test_a_megabyte_is_refused_without_tokenising(text: TextModel, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = unit * (1_000_000 // len(unit))

    def unexpected(*_: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(text.tokenizer), "encode_prompt", unexpected)
    monkeypatch.setattr(type(text.tokenizer), "encode_guarded", unexpected)
    for job in (Job(prompt=content), chat(content)):
        with pytest.raises(ContextLengthExceeded, match=r"at least \d+ tokens; .* 8192"):
            resolve_prompt(job, text)


def test_max_tokens_end_at_the_context() -> None:
    job = Job(prompt="x", max_tokens=100_000)
    assert resolve_max_tokens(job, 37, 8192) == 8155
    assert resolve_max_tokens(Job(prompt="x"), 37, 8192) == 8155
    assert resolve_max_tokens(Job(prompt="x", max_tokens=8), 37, 8192) == 8
    assert resolve_max_tokens(Job(prompt="x", max_tokens=8), 8191, 8192) == 1
