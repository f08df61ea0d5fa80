"""Where batches and their files are kept: on streams of the broker, so that no gateway has what others lack."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from typing import BinaryIO, NamedTuple

from schemas.batch import MAX_FILE_BYTES, MAX_LIFE_S, BatchRecord, FileObject, file_decoder, record_decoder
from schemas.errors import BusUnavailable, JobNotFound, QueueFull, StorageFull, TooLarge
from schemas.subjects import (
    BATCHES_STREAM,
    FILE_META,
    FILES_STREAM,
    RESULTS_STREAM,
    batch_subject,
    file_subject,
    job_of_subject,
    results_subject,
)
from schemas.wire import encode
from services.batch.results import COMPLETED, FAILED, stored
from services.bus import records
from services.bus.connection import Bus

PART_BYTES = 512 * 1024
TRY_S = 30.0
RETRY_S = 0.2
OUTPUT, ERRORS = "-output", "-errors"  # what the names of a batch's own files end with


class Upload(NamedTuple):
    name: str
    size: int


class Shelf:
    """Of one tenant."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant

    # Files

    async def put_file(self, parts: AsyncIterator[bytes], filename: str, purpose: str) -> FileObject:
        """Stores a file as it comes; it is there once it is whole. Raises as `upload` does."""
        return await self.name_file(await self.upload(parts), filename, purpose)

    async def upload(self, parts: AsyncIterator[bytes]) -> Upload:
        """Stores the bytes of a file, which nobody sees before it is named; of one that fails nothing stays.

        Raises `TooLarge`, `StorageFull` or `BusUnavailable`.
        """
        name, size, number, held = f"file-{secrets.token_hex(12)}", 0, 0, bytearray()
        part_bytes = min(PART_BYTES, self._bus.max_payload // 2)
        try:
            async for part in parts:
                held += part
                size += len(part)
                if size > MAX_FILE_BYTES:
                    raise TooLarge(f"the file is larger than {MAX_FILE_BYTES} bytes", param="file")
                while len(held) >= part_bytes:
                    await self._put_part(name, number, bytes(held[:part_bytes]))
                    del held[:part_bytes]
                    number += 1
            if held:
                await self._put_part(name, number, bytes(held))
        except BaseException:
            await asyncio.shield(self.forget(name))
            raise
        return Upload(name, size)

    async def name_file(self, upload: Upload, filename: str, purpose: str, life_s: int = MAX_LIFE_S) -> FileObject:
        """Makes what was uploaded a file. Raises `StorageFull` or `BusUnavailable`."""
        now = int(self._bus.now())
        made = FileObject(
            id=upload.name,
            bytes=upload.size,
            created_at=now,
            expires_at=now + life_s,
            filename=filename or upload.name,
            purpose=purpose,
        )
        await self._put_part(upload.name, FILE_META, encode(made))
        return made

    async def forget(self, name: str) -> None:
        """Erases an upload, named or not."""
        await records.erase(self._bus, FILES_STREAM, file_subject(self._tenant, name, "*"))

    async def file(self, name: str) -> FileObject:
        """Raises `JobNotFound` or `BusUnavailable`."""
        found = await self._kept(name)
        if found.has_expired(self._bus.now()):
            raise _no_file(name)
        return found

    async def _kept(self, name: str) -> FileObject:
        """The same of one whose time may be over."""
        if name.endswith((OUTPUT, ERRORS)):
            return self._made_file(await self._of_output(name), name)
        found = await records.get(self._bus, FILES_STREAM, file_subject(self._tenant, _checked(name), FILE_META))
        if found is None:
            raise _no_file(name)
        return file_decoder.decode(found.payload)

    async def files(self) -> list[FileObject]:
        """Uploaded ones and those that batches made, newest first."""
        metas = await records.latest(self._bus, FILES_STREAM, file_subject(self._tenant, "*", FILE_META))
        made = [file_decoder.decode(meta.payload) for meta in metas]
        found = [file for file in made if not file.has_expired(self._bus.now())]
        for _, record in await self.batches():
            names = (record.batch.output_file_id, record.batch.error_file_id)
            found += [self._made_file(record, name) for name in names if name is not None]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    async def content(self, name: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in parts. Raises `JobNotFound` (behind the first ones if the file goes meanwhile) or
        `BusUnavailable`.
        """
        async for part in self._parts(await self.file(name)):
            yield part

    async def copy(self, name: str, to: BinaryIO) -> None:
        """Raises as `content`. For a batch, which was ordered in time: also of a file whose time is over since."""
        async for part in self._parts(await self._kept(name)):
            await asyncio.to_thread(to.write, part)

    async def _parts(self, file: FileObject) -> AsyncIterator[bytes]:
        name, size = file.id, 0
        if name.endswith((OUTPUT, ERRORS)):
            record = await self._of_output(name)
            outcome = COMPLETED if name.endswith(OUTPUT) else FAILED
            async for result in stored(self._bus, self._tenant, record.batch.id):
                if result.outcome == outcome:
                    yield result.data + b"\n"
            return
        after, more = 0, True
        while more:
            subjects = file_subject(self._tenant, name, "*")
            found, more = await records.read_some(self._bus, FILES_STREAM, subjects, after)
            for part in found:
                after = part.sequence
                if not part.subject.endswith(FILE_META):
                    size += len(part.payload)
                    yield part.payload
        if size != file.bytes:
            raise JobNotFound(f"file {name!r} was removed while it was read", param="file_id")

    async def remove_file(self, name: str) -> None:
        """Raises `JobNotFound`. Of a batch's own file the results go, both its files at once."""
        await self.file(name)
        if name.endswith((OUTPUT, ERRORS)):
            record = await self._of_output(name)
            await records.erase(self._bus, RESULTS_STREAM, results_subject(self._tenant, record.batch.id))
        else:
            await self.forget(name)

    async def _put_part(self, name: str, part: int | str, payload: bytes) -> None:
        """An answer that was lost, or a broker that restarts, ends no upload of 200 MB."""
        subject, deadline_s = file_subject(self._tenant, name, part), self._bus.now() + TRY_S
        while True:
            try:
                await records.put(self._bus, subject, payload, 0)  # stored before: the same
                return
            except QueueFull as error:
                raise StorageFull(
                    "there is no room for more files: delete some, or raise bus.files_max_bytes", param="file"
                ) from error
            except BusUnavailable:
                if self._bus.now() > deadline_s:
                    raise
                await asyncio.sleep(RETRY_S)
                await self._bus.wait_connected(TRY_S)

    def _made_file(self, record: BatchRecord, name: str) -> FileObject:
        is_output = name.endswith(OUTPUT)
        return FileObject(
            id=name,
            bytes=record.output_bytes if is_output else record.error_bytes,
            created_at=record.batch.finalizing_at or record.batch.created_at,
            filename=f"{record.batch.id}{'_output' if is_output else '_error'}.jsonl",
            purpose="batch_output",
        )

    async def _of_output(self, name: str) -> BatchRecord:
        key = name.removeprefix("file-").removesuffix(OUTPUT).removesuffix(ERRORS)
        _, record = await self.batch(f"batch_{key}")
        if name not in (record.batch.output_file_id, record.batch.error_file_id):
            raise _no_file(name)
        return record

    # Batches

    async def batch(self, name: str) -> tuple[int, BatchRecord]:
        """With the sequence that its successor must name. Raises `JobNotFound` or `BusUnavailable`."""
        found = await records.get(self._bus, BATCHES_STREAM, batch_subject(self._tenant, _checked(name)))
        if found is None:
            raise JobNotFound(f"there is no batch {name[:128]!r}", param="batch_id")
        return found.sequence, record_decoder.decode(found.payload)

    async def batches(self) -> list[tuple[int, BatchRecord]]:
        """Newest first."""
        return [(sequence, record) for _, sequence, record in await all_batches(self._bus, self._tenant)]

    async def put_batch(self, record: BatchRecord, last: int = 0) -> int | None:
        """Replaces the record with sequence `last`. Its sequence; None if another one has come between."""
        return await records.put(self._bus, batch_subject(self._tenant, record.batch.id), encode(record), last)


async def all_batches(bus: Bus, tenant: str) -> list[tuple[str, int, BatchRecord]]:
    """Each with its tenant, newest first; `tenant` may be `*`. Raises `BusUnavailable`."""
    found = await records.latest(bus, BATCHES_STREAM, batch_subject(tenant, "*"))
    read = [(job_of_subject(each.subject)[0], each.sequence, record_decoder.decode(each.payload)) for each in found]
    return sorted(read, key=lambda item: (item[2].batch.created_at, item[2].batch.id), reverse=True)


def output_names(batch: str) -> tuple[str, str]:
    """What the output and the error file of a batch are called."""
    key = batch.removeprefix("batch_")
    return f"file-{key}{OUTPUT}", f"file-{key}{ERRORS}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def batch_id_of(file: BinaryIO, *more: str) -> str:
    """The same for the same bytes and the same `more`."""
    digest = hashlib.blake2b(digest_size=12, person=b"kvrelay-batch")
    for text in more:
        digest.update(len(text).to_bytes(4, "little") + text.encode())
    file.seek(0)
    while part := file.read(1 << 20):
        digest.update(part)
    return f"batch_{digest.hexdigest()}"


def _no_file(name: str) -> JobNotFound:
    return JobNotFound(f"there is no file {name[:128]!r}", param="file_id")


def _checked(name: str) -> str:
    """A name that may stand in a subject. Raises `JobNotFound` for others: nothing is called that."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or len(name) > 64:
        raise JobNotFound(f"nothing is called {name[:128]!r}")
    return name
