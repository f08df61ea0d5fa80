"""Runs the batches of a tenant, or of all: those that nobody runs, one process each. Keepers share them by the records.

Two processes that take each other for dead may run one batch at once: their jobs and results are the same ones.
"""

import asyncio
import contextlib
import logging
import tempfile
from typing import Any

import msgspec

from schemas.batch import ENDED, Batch, BatchError, BatchErrors, BatchRecord, BatchStatus, RequestCounts
from schemas.errors import BusUnavailable, JobNotFound, KvrelayError
from schemas.subjects import batch_subject
from services.batch.lines import Plan, make_plan
from services.batch.results import COMPLETED, Result, stored
from services.batch.run import BatchRun, Setting
from services.batch.shelf import Shelf, all_batches, output_names
from services.bus import records
from services.bus.beats import BeatTable

LOOK_S = 2.0
TELL_S = 1.0  # how often the counts of a running batch are told

log = logging.getLogger("kvrelay.batch")


class BatchKeeper:
    """`process`: the name under which this process beats. The tenant of `setting` may be `*`."""

    def __init__(self, setting: Setting, beats: BeatTable, process: str) -> None:
        self._setting = setting
        self._beats = beats
        self._process = process
        self._running: dict[str, Keeping] = {}
        self._broken: set[str] = set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; what runs then goes on in another process."""
        subjects = batch_subject(self._setting.tenant, "*")
        async with (
            records.listening(self._setting.bus, subjects, self._changed.set),
            asyncio.TaskGroup() as group,
        ):
            while True:
                try:
                    await self._look(group)
                except BusUnavailable:
                    pass
                except KvrelayError as error:  # what runs goes on, and what waits is looked at again
                    log.warning("batches cannot be read: %s", error.message)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        for tenant, sequence, record in await all_batches(self._setting.bus, self._setting.tenant):
            batch = record.batch
            running = self._running.get(batch.id)
            if running is not None:
                if batch.status == "cancelling":
                    running.cancel()
            elif batch.status not in ENDED and batch.id not in self._broken and not self._runs_elsewhere(record):
                mine = msgspec.structs.replace(record, runner=self._process)
                shelf = Shelf(self._setting.bus, tenant)
                taken = await shelf.put_batch(mine, sequence)
                if taken is not None:
                    setting = self._setting._replace(tenant=tenant)
                    keeping = self._running[batch.id] = Keeping(setting, shelf, mine, taken)
                    group.create_task(self._keep(keeping, batch.id))

    def _runs_elsewhere(self, record: BatchRecord) -> bool:
        return record.runner != self._process and any(b.process == record.runner for b in self._beats.alive("gateway"))

    async def _keep(self, keeping: "Keeping", batch: str) -> None:
        try:
            await keeping.run()
        except (JobNotFound, BusUnavailable) as error:
            log.warning("batch %s stops for now: %s", batch, error.message)
        except Exception:
            # The others go on; this one goes on in another process, or in the next life of this one.
            log.exception("batch %s stops", batch)
            self._broken.add(batch)
        finally:
            self._running.pop(batch, None)
            self._changed.set()


class Keeping:
    """One batch in this process, from its record to its end."""

    def __init__(self, setting: Setting, shelf: Shelf, record: BatchRecord, sequence: int) -> None:
        self._setting = setting
        self._shelf = shelf
        self._record = record
        self._sequence = sequence
        self._done: set[int] = set()
        self._counts = RequestCounts()
        self._sizes = {True: 0, False: 0}  # bytes of the output and of the error file
        self._work: asyncio.Task[None] | None = None
        self._cancelled = record.batch.status == "cancelling"

    def cancel(self) -> None:
        self._cancelled = True
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Raises `BusUnavailable`, and `JobNotFound` when the batch or its input was removed."""
        with tempfile.TemporaryFile() as file:
            try:
                await self._shelf.copy(self._batch.input_file_id, file)
            except JobNotFound as error:
                await self._recount(self._batch.request_counts.total)  # what was answered before stays
                await self._end("failed", errors=_because(error))
                return
            file.seek(0)
            plan = await asyncio.to_thread(make_plan, file, self._batch.endpoint)
            if plan.errors:
                await self._end("failed", errors=BatchErrors(plan.errors))
                return
            await self._recount(plan.total)
            if self._batch.status == "validating":
                await self._tell(status="in_progress", in_progress_at=self._now())
            run = BatchRun(self._setting, self._batch.id, self._batch.endpoint, file, self._on_result)
            await self._finish(run, plan, await self._worked(run, plan))

    async def _worked(self, run: BatchRun, plan: Plan) -> BatchStatus:
        """How it ended."""
        telling = asyncio.create_task(self._tell_counts())
        try:
            if self._cancelled:
                return "cancelled"
            self._work = asyncio.create_task(run.run(plan, self._done))
            async with asyncio.timeout(max(0.0, self._batch.expires_at - self._setting.bus.now())):
                await self._work
            return "completed"
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return "cancelled"
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _finish(self, run: BatchRun, plan: Plan, how: BatchStatus) -> None:
        if how == "expired":
            await run.give_up("the batch expired")
            await run.refuse_rest(plan, set(self._done), "batch_expired", "the batch expired before this line's turn")
        elif how == "cancelled":
            await run.give_up("the batch was cancelled")
        else:
            await self._tell(status="finalizing", finalizing_at=self._now())
        await self._recount(plan.total)
        await self._end(how)

    def _on_result(self, result: Result) -> None:
        self._count(result)

    def _count(self, result: Result) -> None:
        completed = result.outcome == COMPLETED
        self._done.add(result.line)
        self._sizes[completed] += len(result.data) + 1
        before = self._counts
        self._counts = RequestCounts(before.total, before.completed + completed, before.failed + (not completed))

    async def _recount(self, total: int) -> None:
        self._counts, self._done, self._sizes = RequestCounts(total), set(), {True: 0, False: 0}
        async for result in stored(self._setting.bus, self._setting.tenant, self._batch.id):
            self._count(result)

    async def _tell_counts(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            if self._counts != self._batch.request_counts:
                with contextlib.suppress(BusUnavailable):
                    await self._tell()

    async def _end(self, how: BatchStatus, errors: BatchErrors | None = None) -> None:
        output, failures = output_names(self._batch.id)
        await self._tell(
            status=how,
            errors=errors,
            output_file_id=output if self._counts.completed else None,
            error_file_id=failures if self._counts.failed else None,
            **{f"{how}_at": self._now()},
        )

    async def _tell(self, **changes: Any) -> None:
        """Writes the record behind whatever came between: a wish to cancel is kept."""
        while True:
            counts = {"request_counts": self._counts}
            batch = msgspec.structs.replace(self._batch, **counts, **changes)
            sizes = {"output_bytes": self._sizes[True], "error_bytes": self._sizes[False]}
            record = msgspec.structs.replace(self._record, batch=batch, **sizes)
            stored_at = await self._shelf.put_batch(record, self._sequence)
            if stored_at is not None:
                self._record, self._sequence = record, stored_at
                return
            self._sequence, found = await self._shelf.batch(self._batch.id)
            if found.batch.status in ENDED or found.runner != self._record.runner:
                raise JobNotFound(f"batch {self._batch.id} went on elsewhere")
            self._record = found
            if found.batch.status == "cancelling" and changes.get("status") in ("in_progress", "finalizing"):
                changes.pop("status")
                self.cancel()

    @property
    def _batch(self) -> Batch:
        return self._record.batch

    def _now(self) -> int:
        return int(self._setting.bus.now())


def _because(error: KvrelayError) -> BatchErrors:
    return BatchErrors([BatchError(code=error.code, message=error.message, param=error.param)])
