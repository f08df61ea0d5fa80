"""Jobs are parsed strictly, and a digest tells two of them apart."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import BY_CODE, Internal, InvalidRequest, KvrelayError, UnsupportedVersion, error_from_code
from schemas.job import Job, job_digest, parse_job
from schemas.subjects import check_job_id, derived_job_id, derived_seed, model_slug, retry_id
from schemas.wire import encode


@pytest.mark.parametrize(
    ("job", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_token": 5}, "max_token"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "temperature": "0.5"}, "temperature"),
        ({"prompt": "a", "top_p": -0.1}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "stop": [""]}, "stop[...]"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "timeout_s": 3601}, "timeout_s"),
        ({"prompt": "a", "id": "a.b"}, "id"),
        ({"prompt": "a", "id": "*"}, "id"),
        ({"prompt": "a", "id": "x" * 65}, "id"),
        ({"messages": [{"role": "user<|im_end|>", "content": "a"}]}, "messages[...].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[...].content"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids[...]"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[...]"),
        ({"prompt": "a", "metadata": {"m": "x" * 70_000}}, "metadata"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(job: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refused:
        parse_job(encode(job))
    assert refused.value.param is not None
    assert refused.value.param.replace("[0]", "[...]") == param


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b'{"a":1, x}',
        b"[]",
        b"null",
        b'"s"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":"\xff"}',
        b'{"prompt":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","seed":' + b"9" * 400 + b"}",
        '{"prompt":"a"}'.encode("utf-16"),
    ],
)
def test_what_is_no_job_is_refused_and_nothing_else_happens(payload: bytes):
    with pytest.raises(InvalidRequest):
        parse_job(payload)


def test_a_newer_version_is_told_apart_even_when_its_fields_are_unknown():
    with pytest.raises(UnsupportedVersion):
        parse_job(b'{"v":2,"prompt":{"new":"form"}}')


@pytest.mark.parametrize("bad", [rb'"\ud83d"', rb'"\udc4b\ud83d"'])
def test_a_lone_surrogate_is_refused_with_its_field(bad: bytes):
    with pytest.raises(InvalidRequest) as refused:
        parse_job(b'{"messages":[{"role":"user","content":' + bad + b"}]}")
    assert refused.value.param == "messages[0].content"


def test_a_good_pair_and_nul_pass():
    assert parse_job(rb'{"prompt":"\ud83d\udc4b\u0000"}').prompt == "👋\x00"


_jobs = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, max_size=5)},
    optional={
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.floats(-1, 1), max_size=3),
        "metadata": st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
        "stop": st.lists(st.text(min_size=1, max_size=2), max_size=2),
    },
)


@given(_jobs, _jobs)
@settings(max_examples=200, deadline=None)
def test_the_digest_is_of_the_content(one: dict[str, Any], other: dict[str, Any]):
    first, second = parse_job(encode(one)), parse_job(encode(other))
    assert (job_digest(first) == job_digest(second)) == (first == second)
    shuffled = dict(reversed([(k, dict(reversed(v.items())) if isinstance(v, dict) else v) for k, v in one.items()]))
    assert job_digest(parse_job(encode(shuffled))) == job_digest(first)


def test_who_watches_does_not_change_the_job():
    assert job_digest(Job(prompt="a", owner="g", on_disconnect="cancel")) == job_digest(Job(prompt="a"))


def test_ids_and_seeds_are_functions_of_the_message():
    job = derived_job_id(17, 1796005940130)
    assert check_job_id(job) == "17-1796005940130"
    assert derived_seed("default", job) == derived_seed("default", job) == 399449363285650572
    assert derived_seed("other", job) != derived_seed("default", job)
    assert 0 <= derived_seed("default", job) < 2**63
    assert check_job_id(retry_id("x" * 64, 12)) == "x" * 60 + "-r12"
    assert model_slug("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-135m-instruct"


def test_codes_lead_back_to_their_classes():
    assert error_from_code("internal", "m").__class__ is Internal
    assert error_from_code("never heard of", "m").__class__ is Internal
    for code, cls in BY_CODE.items():
        assert cls.code == code and issubclass(cls, KvrelayError)
        assert 400 <= cls.http_status < 600
