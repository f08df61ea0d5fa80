"""The heartbeat that every process publishes on `kvrelay.beat.<process>`."""

from typing import Literal

import msgspec

from schemas.meter import Meter

BEAT_INTERVAL_S = 1.0
KEPT_FREE = 4  # of so many places batches leave one, see `left_to_batches`
SILENT_AFTER_S = 3.5  # no beat for this long: take it for gone
OWNER_SILENT_AFTER_S = 8.0  # an owner's jobs are cancelled after this
BUILD_SILENT_AFTER_S = 60.0  # a build's jobs end with build_gone after this

ProcessRole = Literal["prefill", "decode", "both", "gateway"]
WORKER_ROLES: tuple[ProcessRole, ...] = ("prefill", "decode", "both")
ProcessState = Literal["warming", "ok", "degraded", "draining", "stopped"]


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """`process` is unique to one life of a process; `running` and `capacity` count sequences.

    `text` names what turns a job into token ids and limits: builds that agree on it read a prompt alike. `model`,
    `build` and `text` are known before the worker is ready; empty until then.
    `place` names the folder of a worker's blocks: workers that share it find there what the others store.
    `meter` is what a worker has counted so far; of a gateway, or of an earlier worker, nothing.
    `alibis` name the runs of single jobs that ended for no fault of theirs (`services.worker.alibi`).
    """

    process: str
    role: ProcessRole
    state: ProcessState
    model: str = ""
    build: str = ""
    text: str = ""
    reasons: list[str] = []
    running: int = 0
    capacity: int = 0
    host: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    place: str = ""
    alibis: list[str] = []
    meter: Meter = Meter()

    def plays(self, role: ProcessRole) -> bool:
        """Whether it does the work of `role`."""
        return role in stages_of(self.role)


def stages_of(role: ProcessRole) -> tuple[ProcessRole, ...]:
    """The roles whose work a process of `role` does."""
    return ("prefill", "decode") if role == "both" else (role,)


beat_decoder = msgspec.json.Decoder(Beat)


def left_to_batches(places: int) -> int:
    """Of so many places for sequences: a request that comes now finds one of the others."""
    return places - -(-places // KEPT_FREE)
