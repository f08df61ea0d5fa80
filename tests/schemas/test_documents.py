"""The documents of what goes over NATS: as committed, as made, and as the code decides."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from schemas.asyncapi import asyncapi, documents
from schemas.channels import CHANNELS, PARAMETERS
from schemas.errors import InvalidRequest
from schemas.job import Job, parse_job
from schemas.subjects import (
    Lane,
    Stage,
    batch_subject,
    beat_subject,
    dead_subject,
    decode_subject,
    drain_subject,
    file_subject,
    prefill_subject,
    reply_subject,
    result_subject,
    stream_subjects,
)
from tests.schemas.bus_documents import channel_of

FOLDER = Path(__file__).parents[2] / "infra" / "schemas"
JOB = {"id": "a-1", "prompt": "hi"}


def test_the_committed_ones_are_the_generated_ones() -> None:
    """Otherwise: `make readme`."""
    committed = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.iterdir()}
    assert committed == json.loads(json.dumps(documents()))


def test_every_schema_is_one() -> None:
    for document in documents().values():
        jsonschema.Draft202012Validator.check_schema(document)
    for schema in asyncapi()["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_asyncapi_refers_only_to_what_it_has() -> None:
    made = asyncapi()

    def look(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            if "$ref" in value:
                found = made
                for part in value["$ref"].removeprefix("#/").split("/"):
                    found = found[part]
            for item in value.values():
                look(item)

    look(made)
    assert {name for channel in made["channels"].values() for name in channel.get("parameters", {})} == set(PARAMETERS)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        *((prefill_subject("default", "tiny", lane), "jobs") for lane in Lane),
        (reply_subject("acme", "Job_1-x"), "replies"),
        (decode_subject("tiny", "0123456789ab", Lane.BATCH), "decode"),
        (dead_subject("acme", "1-2"), "dead"),
        (beat_subject("prefill-4711-1f2e3d4c"), "beats"),
        (drain_subject("decode-1-2"), "drains"),
        (result_subject("acme", "batch_12", 3), "results"),
        (file_subject("acme", "file-1", 0), "file_parts"),
        (file_subject("acme", "file-1", "meta"), "files"),
        (batch_subject("acme", "batch_12"), "batches"),
    ],
)
def test_subjects_are_told_apart(subject: str, name: str) -> None:
    assert channel_of(subject) == name


@pytest.mark.parametrize(
    "subject", ["kvrelay.prefill.Acme.tiny.batch", "kvrelay.prefill.a.b.slow", "kvrelay.replies.a.b.c"]
)
def test_other_subjects_are_none(subject: str) -> None:
    with pytest.raises(LookupError):
        channel_of(subject)


def test_the_queues_have_the_channels_that_are_named_after_them() -> None:
    found = {c.stream: c.address for c in CHANNELS if c.stream.endswith("_{model}")}
    for stage in Stage:
        for subject in stream_subjects(stage, "tiny"):
            address = found[f"KVRELAY_{stage.upper()}_{{model}}"]
            parts = zip(address.split("."), subject.split("."), strict=True)
            assert all(part.startswith("{") or part == given for part, given in parts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "stop": ["a"], "seed": -1, "logit_bias": {"3": -100}, "logprobs": 20, "metadata": {"a": [1]}},
        {"prompt": None, "messages": [{"role": "user", "content": "hi"}]},
        {"prompt": None, "prompt_token_ids": [0, 2**32 - 1]},
        {"id": None, "max_tokens": None, "timeout_s": 3600},
        {"id": "a.b"},
        {"id": ""},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]},
        {"prompt": None, "messages": []},
        {"prompt": None, "messages": [{"role": "tool", "content": "hi"}]},
        {"prompt": None, "messages": [{"role": "user"}]},
        {"prompt": None, "prompt_token_ids": [2**32]},
        {"temperature": 2.1},
        {"max_tokens": 0},
        {"stop": [""]},
        {"n": 129},
        {"logprobs": 21},
        {"timeout_s": 0},
        {"on_disconnect": "maybe"},
        {"surprise": 1},
    ],
)
def test_a_schema_takes_the_jobs_that_a_worker_takes(fields: dict[str, Any]) -> None:
    job = {**JOB, **fields}
    found = jsonschema.Draft202012Validator(documents()["job.schema.json"]).is_valid(job)
    try:
        assert isinstance(parse_job(json.dumps(job).encode()), Job)
    except InvalidRequest:
        assert not found
    else:
        assert found
