"""Jobs over NATS."""

import secrets
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from schemas.errors import Cancelled, IdConflict, error_from_code
from schemas.events import Error, Event, Finish, Start, Token
from schemas.job import Job, job_digest, parse_job
from schemas.job_report import JobReport
from schemas.subjects import DEFAULT_TENANT, MSG_ID_HEADER, Lane, check_slug
from schemas.wire import encode
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from services.bus.job_state import look
from services.bus.publish import job_msg_id, submit_job
from services.bus.reader import follow
from services.client.place import Place
from services.settings import Bus as BusSettings


class Client:
    """For one tenant and one model. Made by `async with await Client.connect(...)`; closed by `close`.

    Every method raises errors of `schemas.errors`, `BusUnavailable` first of all.
    """

    def __init__(self, bus: Bus, tenant: str, model: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._model = model

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        model: str = "smollm2-135m-instruct",
        tenant: str = DEFAULT_TENANT,
        **access: str,
    ) -> "Client":
        """`model`: its slug, as `kvrelay workers` shows it. `access`: `user` and `password_file`, `creds_file` or
        `nkey_file`, `tls_ca_file`, `tls_cert_file` and `tls_key_file`, as in [bus].

        Raises `SetupError` if no NATS lets us in.
        """
        check_slug(model, "model")
        check_slug(tenant, "tenant")
        settings = BusSettings(**access)  # type: ignore[arg-type]  # of the names above
        return cls(await Bus.connect(url, "kvrelay-client", settings), tenant, model)

    async def close(self) -> None:
        await self._bus.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(self, *, id: str | None = None, lane: Lane = Lane.INTERACTIVE, **fields: Any) -> Job:
        """Publishes a job: `prompt`, `messages` or `prompt_token_ids`, and any field of `schemas.job.Job`.

        Submitting the same job under the same id again runs nothing twice: do so when in doubt. Raises
        `InvalidRequest`, `QueueFull`, `ModelNotFound` or `TooLarge`.
        """
        job = parse_job(encode({**fields, "id": id or f"py-{secrets.token_hex(12)}"}))
        assert job.id is not None
        headers = {MSG_ID_HEADER: job_msg_id(self._tenant, job.id)}
        await submit_job(self._bus, self._tenant, self._model, lane, encode(job), headers)
        return job

    async def stream(self, job: Job | str, after: Place | None = None) -> AsyncIterator[Event]:
        """The events of a job, or of an id, to its end; those that `after` has seen are left out, and it goes along.

        Raises what the job ended with, and `IdConflict` if the id names another job. Leaving stops nothing: come back
        with the same `after`, from any process, within two hours.
        """
        place = after if after is not None else Place()
        name = job if isinstance(job, str) else job.id
        assert name is not None
        async for event in follow(self._bus, self._tenant, name):
            if isinstance(event, Error):
                raise error_from_code(event.code, event.message, event.param)
            if isinstance(event, Start) and isinstance(job, Job) and event.digest != job_digest(job):
                raise IdConflict(f"the id {name} names another job already: choose another")
            if not place.is_behind(event):
                place.note(event)
                yield event

    async def text(self, job: Job | str) -> str:
        """The whole text of a job with one choice. Raises as `stream` does."""
        return "".join([event.text async for event in self.stream(job) if isinstance(event, Token | Finish)])

    async def cancel(self, job: Job | str) -> bool:
        """False if it had ended."""
        name = job if isinstance(job, str) else job.id
        assert name is not None
        return await cancel_job(self._bus, self._tenant, name, Cancelled("the job was cancelled by its client"))

    async def state(self, job: Job | str) -> JobReport:
        name = job if isinstance(job, str) else job.id
        assert name is not None
        return await look(self._bus, self._tenant, name)
