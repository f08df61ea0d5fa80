"""Whom a queue message is about, readable even when the message is no valid job: the error must reach somebody."""

import json
from typing import NamedTuple

from schemas.errors import InvalidRequest, KvrelayError
from schemas.subjects import DEFAULT_TENANT, Stage, check_job_id, check_slug, derived_job_id, tenant_and_lane
from services.bus.delivery import Delivery


class Address(NamedTuple):
    tenant: str
    job: str
    hop: int


def address_of(delivery: Delivery) -> Address:
    """Never raises: a message without a usable id is addressed by its place in the queue."""
    fields = _fields(delivery.data)
    derived = derived_job_id(delivery.sequence, delivery.stream_created_ms)
    if delivery.stage is Stage.PREFILL:
        tenant = _tenant(delivery.subject)
        if tenant is None:  # the default tenant's jobs must not be ended under an id that somebody else chose
            return Address(DEFAULT_TENANT, derived, 0)
        return Address(tenant, _valid_id(fields.get("id"), derived), 0)
    hop = fields.get("hop")
    named = fields.get("tenant")
    return Address(
        _slug(named) if isinstance(named, str) else DEFAULT_TENANT,
        _valid_id(fields.get("job"), derived),
        hop if isinstance(hop, int) else 0,
    )


def _fields(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _valid_id(value: object, otherwise: str) -> str:
    try:
        return check_job_id(value) if isinstance(value, str) else otherwise
    except InvalidRequest:
        return otherwise


def _slug(value: str) -> str:
    try:
        return check_slug(value, "tenant")
    except InvalidRequest:
        return DEFAULT_TENANT


def _tenant(subject: str) -> str | None:
    try:
        return tenant_and_lane(subject)[0]
    except KvrelayError:
        return None
