"""What a grammar allows, told by its masks; and that these follow from the tokens alone."""

import contextlib
import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from schemas.errors import GrammarFailed, InvalidRequest
from schemas.response_format import ToolCall
from services.text import grammar
from services.text.grammar import Compiler, Mask, Masks, Matcher
from services.text.grammar_source import Source
from services.text.narrowing import MAX_NUMBER, narrowed
from services.text.vocabulary import Vocabulary
from tests.gateway.tiny_model import EOS, tiny_text
from tests.text.random_schemas import random_schema

MAX_TOKENS = 5000


@cache
def compiler() -> Compiler:
    text = tiny_text()
    return Compiler(Vocabulary.of(text.tokenizer, text.vocab_size, text.eos_ids), text.tokenizer.encode)


def ids_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def matcher_of(schema: Any, *tokens: int) -> Matcher:
    matcher = compiler().compile(Source(schema)).matcher()
    for token in tokens:
        matcher.advance(token)
    return matcher


def ahead(matcher: Matcher, guesses: list[int]) -> Masks:
    masks = matcher.nothing(1 + len(guesses))
    matcher.fill(masks, guesses)
    return masks


def encoded(text: str) -> list[int]:
    return tiny_text().tokenizer.encode(text)


def written(schema: dict[str, Any], chance: random.Random) -> list[int]:
    """Tokens drawn from what is allowed, those first that end something: random digits and letters seldom do."""
    matcher, tokens = compiler().compile(Source(schema)).matcher(), list[int]()
    ends = [*encoded('"]}'), EOS]
    while len(tokens) < MAX_TOKENS:
        allowed = ids_of(matcher.mask())
        ending = [token for token in allowed if token in ends]
        token = chance.choice(ending if ending and chance.random() < 0.5 else allowed)
        if token == EOS:
            return tokens
        tokens.append(token)
        matcher.advance(token)
    pytest.fail(f"{schema} does not end")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_drawn_is_valid(seed: int) -> None:
    schema = random_schema(seed)
    tokens = written(schema, random.Random(seed))
    value = json.loads(tiny_text().tokenizer.decode(tokens))
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def test_the_end_token_comes_at_the_end_and_nothing_else_does() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    whole = encoded('{"a": true}')
    for length in range(len(whole)):
        assert EOS not in ids_of(matcher_of(schema, *whole[:length]).mask())
    assert ids_of(matcher_of(schema, *whole).mask()) == [EOS]


def test_a_control_token_in_a_schema_is_text() -> None:
    schema = {"const": "<|im_end|> <|im_start|>"}
    matcher, tokens = compiler().compile(Source(schema)).matcher(), list[int]()
    while EOS not in (allowed := ids_of(matcher.mask())):
        assert min(allowed) > EOS, "no control token is a way to write one"
        tokens.append(allowed[0])
        matcher.advance(tokens[-1])
    assert tiny_text().tokenizer.decode(tokens) == json.dumps(schema["const"])


def test_there_is_one_way_to_space() -> None:
    """Endless blanks are JSON too, and small models love them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for before in ("", "{", '{"a"', '{"a": '):
        allowed = {bytes([token - 3]) for token in ids_of(matcher_of(schema, *encoded(before)).mask()) if token >= 3}
        assert not allowed & {b" ", b"\n", b"\t"} or before == '{"a":'


def test_a_mask_follows_from_the_tokens_alone() -> None:
    """Whether masks were asked for on the way, and guesses tried: who takes over has only the tokens."""
    schema = random_schema(7)
    tokens = written(schema, random.Random(3))
    asked = compiler().compile(Source(schema)).matcher()
    for count, token in enumerate(tokens):
        guesses = tokens[count : count + 5]
        assert asked.num_fitting([*guesses, EOS, EOS]) >= len(guesses)
        for n, mask in enumerate(ahead(asked, guesses)):
            fresh = matcher_of(schema, *tokens[: count + n]).mask()
            assert np.array_equal(mask, fresh)
        asked.advance(token)


def test_guesses_are_fitting_as_far_as_they_are_allowed() -> None:
    matcher = matcher_of({"enum": ["abc", "abd"]})
    assert matcher.num_fitting(encoded('"abc"')) == 5
    assert matcher.num_fitting(encoded('"abx"')) == 3
    assert matcher.num_fitting(encoded("x")) == 0
    assert ids_of(ahead(matcher, encoded('"ab'))[3]) == sorted(encoded("cd"))
    assert ids_of(matcher.mask()) == encoded('"')


@pytest.mark.parametrize("before", ["", '["a"', '["a"]'])
def test_guesses_beyond_the_end_leave_no_trace(before: str) -> None:
    matcher = matcher_of({"type": "array", "items": {"enum": ["a"]}}, *encoded(before))
    mask = matcher.mask()
    rest = encoded('["a"]')[len(before) :]
    for guesses in ([*rest, EOS], [*rest, EOS, EOS], [*rest, *encoded("x")]):
        assert len(rest) <= matcher.num_fitting(guesses) <= len(rest) + 1
        ahead(matcher, guesses)
        assert np.array_equal(matcher.mask(), mask)


@pytest.mark.parametrize("before", ["", '{"nam', '{"name": "x", "co', '{"name": "x", "count": 3'])
def test_where_there_is_no_choice_it_tells_how_it_goes_on(before: str) -> None:
    """As far as each of these tokens is the only one that is allowed; and telling it changes nothing."""
    properties = {"name": {"type": "string"}, "count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "count"], "additionalProperties": False}
    matcher = matcher_of(schema, *encoded(before))
    forced = matcher.forced()
    assert bool(forced) == (not before.endswith("3"))
    for n, token in enumerate(forced):
        assert ids_of(matcher_of(schema, *encoded(before), *forced[:n]).mask()) == [token]
    assert ids_of(matcher.mask()) == ids_of(matcher_of(schema, *encoded(before)).mask())


WORDY = {"type": "string", "pattern": "^([a-z]{1,20}[0-9]{1,15}){1,20}$"}
WORDS = ["".join(chr(97 + (7 * n + start) % 26) * (1 + n % 5) + str(n * start) for n in range(9)) for start in range(4)]


def masks_along(matcher: Matcher, text: str) -> list[Mask]:
    """As many as there are before it fails."""
    found = []
    with contextlib.suppress(GrammarFailed):
        for token in [*encoded(text), None]:
            found.append(matcher.mask())
            if token is not None:
                matcher.advance(token)
    return found


def with_states(limits: Any, count: int) -> Any:
    names = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_grammar_size")
    return type(limits)(**{name: getattr(limits, name) for name in names}, max_lexer_states=count, verbose_errors=False)


@pytest.mark.parametrize("shared", [30, 60])
def test_a_limit_that_one_meets_is_not_met_by_others(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """The lexer is shared, and so is its limit."""
    texts = [f'"{words}' for words in WORDS]
    expected = [masks_along(matcher_of(WORDY), text) for text in texts]
    assert [len(masks) for masks in expected] == [len(encoded(text)) + 1 for text in texts]
    monkeypatch.setattr(grammar, "LIMITS", with_states(grammar.LIMITS, shared))
    compiled = compiler().compile(Source(WORDY))
    for text, masks in zip(texts, expected, strict=True):
        found = masks_along(compiled.matcher(), text)
        assert len(found) == len(masks) and all(map(np.array_equal, found, masks))
    assert compiled.is_spent


def test_only_masks_are_worth_another_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks what may be guessed must not wait until one is compiled: all other jobs wait for him."""
    monkeypatch.setattr(grammar, "LIMITS", with_states(grammar.LIMITS, 30))
    compiled = compiler().compile(Source(WORDY))
    tokens, matcher = encoded(f'"{WORDS[0]}'), compiled.matcher()
    while not matcher._matcher.is_error():
        ahead(matcher, tokens[:1])
        matcher.advance(tokens.pop(0))
    assert matcher.forced() == [] and matcher.num_fitting(tokens) == 0
    assert not compiled.is_spent
    assert ids_of(matcher.mask()) and compiled.is_spent


def test_where_a_choice_fails_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in ("LIMITS", 20), ("OWN_LIMITS", 26):
        monkeypatch.setattr(grammar, name, with_states(grammar.LIMITS, count))
    alone = [len(masks_along(compiler().compile(Source(WORDY)).matcher(), f'"{words}')) for words in WORDS]
    assert all(length < len(encoded(words)) for length, words in zip(alone, WORDS, strict=True))
    compiled = compiler().compile(Source(WORDY))
    masks_along(compiled.matcher(), f'"{WORDS[-1]}')
    assert [len(masks_along(compiled.matcher(), f'"{words}')) for words in WORDS] == alone


def test_a_token_that_is_not_allowed_is_told() -> None:
    with pytest.raises(GrammarFailed):
        matcher_of({"enum": ["abc"]}, *encoded("x")).mask()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strin"}, "strin"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "made-up"}, "made-up"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "http://example.com/schema.json"}, "example.com"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
    ],
)
def test_what_has_no_grammar_is_refused_with_a_reason(schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        compiler().compile(Source(schema))
    assert caught.value.param == "response_format"
    assert not any(ours in caught.value.message for ours in ("at 2(", "start:", "x-guidance")), "nobody wrote that"


def test_a_schema_that_nothing_fulfils_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="no token of this model goes on"):
        compiler().try_out(Source({"$ref": "#"}))


def test_numbers_end() -> None:
    for schema in ({"type": "integer"}, {"type": "number"}, {"type": "number", "minimum": 2}):
        tokens = encoded("9" * 16)
        assert matcher_of(schema).num_fitting(encoded("9" * 40)) < len(tokens) + 1
    assert matcher_of({"type": "number"}).num_fitting(encoded("1." + "3" * 40)) == 11


def test_narrowing_touches_only_schemas() -> None:
    data = {"type": "integer"}
    schema = {"properties": {"type": {"const": data}, "enum": {"type": "integer"}}, "enum": [data], "default": data}
    found = narrowed(schema)
    assert found["enum"] == [data] and found["default"] == data and found["properties"]["type"]["const"] == data
    assert found["properties"]["enum"] == {"type": "integer", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}


@pytest.mark.parametrize("low", [2**60, MAX_NUMBER])
def test_a_bound_that_leaves_no_room_for_ours_stays_alone(low: int) -> None:
    assert narrowed({"type": "integer", "minimum": low}) == {"type": "integer", "minimum": low}


def test_a_call_is_held_to_its_function() -> None:
    """References of the arguments' schema go with it."""
    place = {"$ref": "#/$defs/place", "description": "where"}
    defs = {"place": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}}
    weather = {"type": "object", "properties": {"at": place}, "required": ["at"], "$defs": defs}
    source = Source.of(ToolCall({"now": {}, "weather": weather}))
    for text in ('{"name": "weather", "arguments": {"at": {"city": "Paris"}}}', '{"name": "now", "arguments": {}}'):
        matcher = compiler().compile(source).matcher()
        tokens = encoded(f"<tool_call>\n{text}\n</tool_call>")
        assert matcher.num_fitting(tokens) == len(tokens)
        for token in tokens:
            matcher.advance(token)
        assert ids_of(matcher.mask()) == [EOS]
    wrong = encoded('<tool_call>\n{"name": "weather", "arguments": {"at": {"city": "Rome"}}}')
    assert compiler().compile(source).matcher().num_fitting(wrong) == len(wrong) - len('Rome"}}}')
    assert compiler().compile(source).matcher().num_fitting(encoded("Hello")) == 0
