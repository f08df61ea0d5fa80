"""Events to answers: chunks joined are the whole answer, and both have the shapes that OpenAI documents."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.asked import Asked
from schemas.events import Accepted, Done, Event, Finish, Logprobs, Start, Token, Usage
from services.openai.answer import Answer, Choice, Head
from services.openai.chat_shape import ChatShape
from services.openai.completion_shape import CompletionShape
from services.openai.token_names import TokenNames
from tests.gateway.tiny_model import tiny_text, token_id

NAMES = TokenNames(tiny_text().tokenizer)
Shapes = type[ChatShape] | type[CompletionShape]


def answer(shape: Shapes, *, n: int = 1, num_jobs: int = 1, logprobs: bool = False, usage: bool = False) -> Answer:
    head = Head(id="x-1", model="m", created=7)
    return Answer(head, shape(head, NAMES, usage), num_jobs, n, logprobs, usage)


def start(job: str = "j") -> Start:
    return Start(job=job, origin="o", digest="d", build="b1", seed=1, prompt_tokens=3, cached_tokens=2)


def token(index: int, text: str, *, choice: int = 0, id_: int = 70, logprob: float | None = None) -> Token:
    logprobs = None if logprob is None else Logprobs(logprob, [(id_, logprob), (71, float("-inf"))])
    return Token(choice=choice, index=index, id=id_, text=text, logprobs=logprobs)


def done(tokens: int) -> Done:
    return Done(usage=Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=2))


def chunks(made: Answer, events: list[Event], prompt: int = 0) -> list[dict[str, Any]]:
    return [json.loads(chunk.data) for event in events for chunk in made.add([(prompt, event)])]


def test_chat_stream() -> None:
    made = answer(ChatShape)
    got = chunks(
        made,
        [
            start(),
            token(0, "He"),
            token(1, ""),
            token(2, "y"),
            Finish(choice=0, reason="stop", text="!", tokens=3),
            done(3),
        ],
    )
    assert [c["choices"][0]["delta"] for c in got] == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
        {"content": "y"},
        {"content": "!"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in got] == [None, None, None, None, "stop"]
    heads = {(c["id"], c["model"], c["created"], c["object"], c["system_fingerprint"]) for c in got}
    assert heads == {("x-1", "m", 7, "chat.completion.chunk", "b1")}
    assert all("usage" not in c for c in got)


def test_usage_chunk_and_nulls_before_it() -> None:
    made = answer(ChatShape, usage=True)
    got = chunks(made, [start(), token(0, "a"), Finish(choice=0, reason="length", tokens=1), done(1)])
    assert all(c["usage"] is None for c in got)
    last = json.loads(made.ending()[0].data)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert json.loads(made.whole())["usage"] == last["usage"]


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_chunks_joined_are_the_whole_answer(shape: Shapes) -> None:
    made = answer(shape, n=2)
    events: list[Event] = [start()]
    for index, text in enumerate(["日", "", "本👋"]):
        events += [token(index, text, choice=0), token(index, text + "x", choice=1)]
    events += [
        Finish(choice=1, reason="stop", stop="q", text="r", tokens=3),
        Finish(choice=0, reason="length", tokens=3),
    ]
    joined = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in chunks(made, [*events, done(6)]):
        (part,) = chunk["choices"]
        joined[part["index"]] += part["delta"].get("content", "") if shape is ChatShape else part["text"]
        reasons[part["index"]] = reasons[part["index"]] or part["finish_reason"]
    whole = json.loads(made.whole())["choices"]
    texts = [c["message"]["content"] if shape is ChatShape else c["text"] for c in whole]
    assert joined == texts == ["日本👋", "日xx本👋xr"]
    assert reasons == [c["finish_reason"] for c in whole] == ["length", "stop"]


def test_a_matched_stop_string_leaves_no_content_delta() -> None:
    got = chunks(
        answer(ChatShape), [start(), token(0, ""), Finish(choice=0, reason="stop", stop="x", tokens=1), done(1)]
    )
    assert not any(c["choices"][0]["delta"].get("content") for c in got)


def test_chat_logprobs() -> None:
    made = answer(ChatShape, logprobs=True)
    half = token_id(0xF0)
    events = [start(), token(0, "C", id_=70, logprob=-0.5), token(1, "", id_=half, logprob=-1.0)]
    got = chunks(made, [*events, Finish(choice=0, reason="length", tokens=2), done(2)])
    entries = [e for c in got if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert entries == json.loads(made.whole())["choices"][0]["logprobs"]["content"]
    assert entries[0]["token"] == "C"
    assert entries[0]["bytes"] == [67]
    assert entries[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert entries[1]["token"] == "\ufffd"
    assert entries[1]["bytes"] == [0xF0]


def test_completion_logprobs() -> None:
    made = answer(CompletionShape, logprobs=True)
    half = token_id(0xF0)
    events = [
        start(),
        token(0, "C", id_=70, logprob=-0.5),
        token(1, "é", id_=half, logprob=-1.0),
        token(2, "", logprob=-2.0),
    ]
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks(made, [*events, Finish(choice=0, reason="stop", tokens=3), done(3)]):
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[key] += values
    whole = json.loads(made.whole())["choices"][0]["logprobs"]
    assert whole == streamed
    assert whole["tokens"] == ["C", "bytes:\\xf0", "C"]
    assert whole["text_offset"] == [0, 1, 2]
    assert whole["top_logprobs"][0] == {"C": -0.5, "D": -9999.0}


def test_several_prompts_number_their_choices_like_openai() -> None:
    made = answer(CompletionShape, n=2, num_jobs=2)
    events = [token(0, "c0", choice=0), token(0, "c1", choice=1)]
    events += [Finish(choice=0, reason="stop", tokens=1), Finish(choice=1, reason="stop", tokens=1), done(2)]
    second = chunks(made, [start(), *events], prompt=1)
    first = chunks(made, [start(), *events], prompt=0)
    assert {c["choices"][0]["index"] for c in second} == {2, 3}
    assert {c["choices"][0]["index"] for c in first} == {0, 1}
    whole = json.loads(made.whole())
    assert [c["text"] for c in whole["choices"]] == ["c0", "c1", "c0", "c1"]
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == 4


def test_a_resumed_start_opens_no_second_role() -> None:
    made = answer(ChatShape)
    assert len(chunks(made, [start(), start()])) == 1


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), usage=st.booleans())
def test_chunks_of_nothing_but_text_are_spelled_as_any_other(shape: Shapes, texts: list[str], usage: bool) -> None:
    """Also those that come before it is known who made them, and when the answer began."""
    made = answer(shape, n=2, usage=usage)
    spelling = shape(made.head, NAMES, usage)
    changes: list[Event] = [
        Accepted(job="j", model="m", asked=Asked(key="k", route="chat", created=99, n=2)),
        start(),
    ]
    for index, text in enumerate(texts):
        if index and changes:
            made.add([(0, changes.pop(0))])
        (chunk,) = made.add([(0, token(index, text, choice=1))])
        assert chunk.data == msgspec.json.encode(spelling.piece(Choice(1), text, None, ()))
