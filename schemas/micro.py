"""What a process answers on NATS's service subjects (`nats micro`; NATS ADR-32): its name, what it does, how much."""

from typing import Literal

import msgspec

from schemas.beat import Beat

Verb = Literal["PING", "INFO", "STATS"]
PREFIX = "$SRV"


def service_name(role: str) -> str:
    """All processes of a role are one service."""
    return f"kvrelay-{role}"


def service_subjects(verb: Verb, name: str, process: str) -> list[str]:
    """Where everybody, a service, or one process of it is asked."""
    return [f"{PREFIX}.{verb}", f"{PREFIX}.{verb}.{name}", f"{PREFIX}.{verb}.{name}.{process}"]


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """`id` is the process's name, `version` kvrelay's; `metadata` says its state, model and build."""

    name: str
    id: str
    version: str
    metadata: dict[str, str]
    type: Literal["io.nats.micro.v1.ping_response"] = "io.nats.micro.v1.ping_response"


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`queue_group`: the stream whose messages the processes share among them, if there is one."""

    name: str
    subject: str
    queue_group: str = ""
    metadata: dict[str, str] = {}


class Info(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: str
    version: str
    metadata: dict[str, str]
    description: str
    endpoints: list[EndpointInfo]
    type: Literal["io.nats.micro.v1.info_response"] = "io.nats.micro.v1.info_response"


class EndpointStats(msgspec.Struct, frozen=True, kw_only=True):
    """Times are nanoseconds. `last_error` is a code, never what a client wrote. `data`: the process's beat."""

    name: str
    subject: str
    queue_group: str
    num_requests: int
    num_errors: int
    last_error: str
    processing_time: int
    average_processing_time: int
    data: Beat


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`started`: RFC 3339, UTC."""

    name: str
    id: str
    version: str
    metadata: dict[str, str]
    started: str
    endpoints: list[EndpointStats]
    type: Literal["io.nats.micro.v1.stats_response"] = "io.nats.micro.v1.stats_response"
