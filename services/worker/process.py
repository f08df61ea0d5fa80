"""The life of a worker process: warm up, say so, take jobs one at a time, hand back, exit.

The stages differ in their `Role`; everything about queues, claims, poison, cancels and shutdown is here.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Protocol

from schemas.beat import OWNER_SILENT_AFTER_S, Beat, ProcessState
from schemas.errors import Cancelled, KvrelayError, Poisoned, Settle
from schemas.events import Retry
from schemas.subjects import Stage, claim
from services import telemetry
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.cancels import CancelListener
from services.bus.connection import Bus
from services.bus.delivery import Delivery, run_delivery
from services.bus.history import read_all
from services.bus.publish import dead_letter
from services.bus.queue import WorkQueue
from services.bus.replies import ReplyWriter
from services.bus.streams import ensure_consumers, ensure_streams
from services.engine.batch import Batch
from services.worker.admission import Admission
from services.worker.history import History
from services.worker.room import Permit, Room
from services.worker.run import JobRun
from services.worker.runtime import Runtime

log = logging.getLogger(__name__)

MAX_LONE_RUNS = 3
OWNER_CHECK_S = 1.0


class Address(Protocol):
    """Who a queue message is about; known even when the message itself is no valid job."""

    tenant: str
    job: str
    hop: int


class Role(Protocol):
    """What a stage adds to the process."""

    name: str
    batch: Batch

    def sources(self) -> list[tuple[Stage, object]]: ...

    def address(self, delivery: Delivery) -> Address:
        """Never raises."""

    async def ready_for_more(self) -> None:
        """Returns when another job may be pulled, apart from sequences and pages."""

    async def work(self, run: JobRun, permit: Permit) -> None:
        """The job, from its message to the last thing that must be stored before the message is settled."""

    async def drain(self, grace_s: float) -> None:
        """No more jobs come: finish or hand back those that run."""


class WorkerProcess:
    def __init__(self, runtime: Runtime, bus: Bus, role: Role, beats: BeatTable, process: str) -> None:
        self.runtime = runtime
        self.bus = bus
        self.role = role
        self.beats = beats
        self.process = process
        self.room = Room(runtime.pool, runtime.settings.scheduler.max_sequences)
        self.state: ProcessState = "warming"
        self._admission = Admission()
        self._runs: dict[tuple[str, str], JobRun] = {}
        self._jobs: set[asyncio.Task[None]] = set()
