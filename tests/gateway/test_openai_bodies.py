"""Request bodies: what is refused, by which name, and what is let through."""

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, KvrelayError, TooLarge
from schemas.openai import MAX_PROMPTS, error_body, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


def completion(prompt: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"s"',
        b'{"a":1, x}',
        b'{"model":"m","model":"n","messages":[]}',
        b'{"model":"m","messages":[{"role":"user","role":"system","content":"x"}]}',
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","temperature":-Infinity}',
        b"[" * 1000 + b"]" * 1000,
        b'{"foo":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"foo":' + b"9" * 5000 + b"}",
        chat().decode().encode("utf-16"),
        b"\xff",
        b"\x1f\x8b\x08\x00\x00",
        b'{"\\ud83d":1,"\\ud83d":2}',
        chat(stream="yes"),
    ],
)
def test_broken_bodies_are_invalid_requests(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body)
    assert msgspec.json.encode(error_body(caught.value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 1.5, "5", int("9" * 400), True)],
        *[("max_completion_tokens", value) for value in (0, "5")],
        *[("temperature", value) for value in (-1, 100, "0.5", 2.01)],
        *[("top_p", value) for value in (1.01, -0.1)],
        *[("top_k", value) for value in (-2, 1.5)],
        *[("logit_bias", value) for value in ({"abc": 1}, {"1": 101}, {"-1": 1}, [1])],
        *[("presence_penalty", value) for value in (2.1, -2.1)],
        ("repetition_penalty", 0),
        ("n", 0),
        ("seed", 2**63),
        *[("stop", value) for value in ("", ["a"] * 5, [1], [""])],
        ("top_logprobs", 21),
        ("stream_options", {"include_usage": "yes"}),
        ("messages", []),
        ("messages", None),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", "json"),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "code_interpreter"}]),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}),
    ],
)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(**{field: value}))
    assert caught.value.param == field or str(caught.value.param).startswith(field + ".")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("guided_json", {}),
        ("min_tokens", 3),
        ("stream_options", {"continuous_usage_stats": True}),
    ],
)
def test_known_but_unsupported_fields_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        parse_chat(chat(**{field: value}, stream=True))
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"echo": True, "logprobs": 1}, {"best_of": 3}, {"best_of": 2, "n": 1}]
)
def test_unsupported_fields_of_completions(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        parse_completion(completion("x", **fields))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(echo=True), "echo"),
        (chat(best_of=2), "best_of"),
        (completion("x", top_logprobs=1), "top_logprobs"),
        (completion("x", tools=[{}]), "tools"),
    ],
)
def test_fields_of_the_other_route_are_refused_by_name(body: bytes, param: str) -> None:
    parse = parse_chat if b"messages" in body else parse_completion
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        parse(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "words"),
    [(b'{"n":' + b"9" * 5000 + b"}", "an integer of more than 4300 digits"), (b"\xef\xbb\xbf{}", "a byte order mark")],
)
def test_what_json_cannot_be_is_said_without_words_about_python(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_chat(body)
    assert "sys." not in caught.value.message and "decode" not in caught.value.message


def test_values_that_ask_for_nothing_are_harmless() -> None:
    parsed = parse_chat(
        chat(
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            store=False,
            functions=None,
            logit_bias=None,
            user="u",
            service_tier="auto",
        )
    )
    assert parsed.user == "u"
    assert parse_completion(completion("x", echo=False, best_of=2, n=2, suffix=None)).n == 2


def test_unknown_fields_are_ignored_unless_strict() -> None:
    assert parse_chat(chat(foo={"bar": 1})).model == "m"
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(foo=1), strict=True)
    assert caught.value.param == "foo"
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(messages=[{"role": "user", "content": "x", "colour": 1}]), strict=True)
    assert caught.value.param == "messages[0].colour"
    assert parse_chat(chat(user="u", tools=None, prompt_cache_key="k"), strict=True).user == "u"


def test_contradictions_are_refused() -> None:
    for fields in (
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"top_logprobs": 2},
        {"stream_options": {"include_usage": True}},
    ):
        with pytest.raises(InvalidRequest):
            parse_chat(chat(**fields))


def test_both_limits_name_one_number() -> None:
    assert parse_chat(chat(max_tokens=5)).token_limit == 5
    assert parse_chat(chat(max_completion_tokens=6)).token_limit == 6
    assert parse_chat(chat()).token_limit is None
    assert parse_completion(completion("x")).token_limit == 16


def test_missing_fields_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(b'{"model":"m"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt", [[], [1.5], [[1.5]], None, [1, "x"], ["a", [1]], {"a": 1}, ["x"] * (MAX_PROMPTS + 1)]
)
def test_bad_prompts_are_named(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(prompt)).prompts()
    assert caught.value.param == "prompt"


def test_forms_of_a_prompt() -> None:
    assert parse_completion(completion("x")).prompts() == ["x"]
    assert parse_completion(completion([1, 2])).prompts() == [[1, 2]]
    assert parse_completion(completion(["a", "b"])).prompts() == ["a", "b"]
    assert parse_completion(completion([[1], [2, 3]])).prompts() == [[1], [2, 3]]


@pytest.mark.parametrize("text", ["\\ud83d", "\\udc4b\\ud83d"])
def test_a_lone_surrogate_is_traced_to_its_field(text: str) -> None:
    body = f'{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}'
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body.encode())
    assert caught.value.param == "messages[0].content"


def test_a_good_pair_and_nul_are_text() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\udc4b\\u0000"}]}'
    assert parse_chat(body).messages[0].content == "👋\x00"


def test_metadata_is_bounded() -> None:
    with pytest.raises(TooLarge):
        parse_chat(chat(metadata={"a": "x" * 300_000}))


def test_error_body_has_openai_keys() -> None:
    body = error_body(InvalidRequest("no", param="stop"))
    assert body == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "stop", "code": "invalid_request"}
    }


TEXT = st.text(alphabet="ab0é👋\x00\ud83d", max_size=3)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(TEXT, LEAF | st.lists(LEAF, max_size=2), max_size=3)
FIELDS = ["model", "messages", "prompt", "stop", "n", "stream", "logit_bias", "max_tokens", "tools", "stream_options"]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_object_is_parsed_or_refused_on_purpose(body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    for parse in (parse_chat, parse_completion):
        try:
            parse(data, strict=True)
        except KvrelayError as error:
            assert 400 <= error.http_status < 500
            assert msgspec.json.encode(error_body(error))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused_on_purpose(data: bytes) -> None:
    with pytest.raises(KvrelayError):
        parse_chat(data)
