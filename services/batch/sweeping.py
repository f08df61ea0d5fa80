"""Removes what nobody will read: files whose time is over, and the parts of uploads whose gateway died."""

import asyncio
import contextlib
import logging

from schemas.batch import ENDED, file_decoder
from schemas.errors import KvrelayError
from schemas.subjects import FILE_META, FILES_STREAM, file_subject
from services.batch.shelf import all_batches
from services.bus import records
from services.bus.connection import Bus

SWEEP_S = 60.0
ABANDONED_S = 600.0  # an upload of which nothing came for so long; its gateway waits for api.read_timeout_s

log = logging.getLogger("kvrelay.batch")


class Sweeper:
    """`tenant` may be `*`. Any number of processes may sweep at once."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._last: dict[str, tuple[int, float]] = {}  # of each upload without a name: its last part, and since when

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(KvrelayError):  # looked at again
                await self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Raises `BusUnavailable`, or `Internal` for what the broker refuses."""
        now = self._bus.now()
        metas = await records.latest(self._bus, FILES_STREAM, file_subject(self._tenant, "*", FILE_META))
        expired = {meta.subject for meta in metas if file_decoder.decode(meta.payload).has_expired(now)}
        for subject in expired - (await self._used() if expired else set()):
            await self._erase(subject, "expired")
        await self._sweep_unnamed({_of(meta.subject, "*") for meta in metas}, now)

    async def _used(self) -> set[str]:
        """By batches that have not ended: who goes on with one reads its file again."""
        return {
            file_subject(tenant, record.batch.input_file_id, FILE_META)
            for tenant, _, record in await all_batches(self._bus, self._tenant)
            if record.batch.status not in ENDED
        }

    async def _sweep_unnamed(self, named: set[str], now: float) -> None:
        firsts = await records.subjects(self._bus, FILES_STREAM, file_subject(self._tenant, "*", 0))
        before, self._last = self._last, {}
        for upload in {_of(first, "*") for first in firsts} - named:
            last = await records.get(self._bus, FILES_STREAM, upload)
            if last is None:
                continue
            sequence, since = before.get(upload, (0, now))
            if sequence != last.sequence:
                since = now
            if now - since >= ABANDONED_S:
                await self._erase(upload, "was given up while it was uploaded")
            else:
                self._last[upload] = last.sequence, since

    async def _erase(self, subject: str, why: str) -> None:
        await records.erase(self._bus, FILES_STREAM, _of(subject, "*"))
        log.info("file %s %s", subject.split(".")[-2], why)


def _of(subject: str, part: str) -> str:
    """The same file's subject of another part."""
    return f"{subject.rpartition('.')[0]}.{part}"
