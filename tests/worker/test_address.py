"""Every message has somebody to answer, and never somebody who did not ask."""

from types import SimpleNamespace
from typing import Any

import pytest

from schemas.subjects import Stage, derived_job_id
from services.worker.address import Address, address_of

DERIVED = derived_job_id(7, 1000)


def delivery(data: bytes, subject: str = "kvrelay.prefill.acme.m.batch", stage: Stage = Stage.PREFILL) -> Any:
    return SimpleNamespace(data=data, subject=subject, stage=stage, sequence=7, stream_created_ms=1000)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[1]", b'{"id": 5}', b'{"id": "a.b"}', b'{"id": ""}', b"[" * 100_000, b'{"id": "' + b"a" * 65],
)
def test_a_message_without_a_usable_id_is_named_by_its_place(data: bytes):
    assert address_of(delivery(data)) == Address("acme", DERIVED, 0)


def test_an_id_counts_within_its_tenant():
    assert address_of(delivery(b'{"id": "mine", "nonsense": 1}')) == Address("acme", "mine", 0)


def test_a_tenant_that_is_none_cannot_name_jobs_of_the_default_one():
    bad = delivery(b'{"id": "mine"}', subject="kvrelay.prefill.ACME.m.batch")
    assert address_of(bad) == Address("default", DERIVED, 0)


def test_a_hand_off_says_whose_it_is():
    data = b'{"tenant": "acme", "job": "mine", "hop": 3, "v": 99}'
    assert address_of(delivery(data, "kvrelay.decode.m.b.batch", Stage.DECODE)) == Address("acme", "mine", 3)
    assert address_of(delivery(b"junk", "kvrelay.decode.m.b.batch", Stage.DECODE)) == Address("default", DERIVED, 0)
