"""What a request is called: by us, on the bus, and by its client."""

import contextlib
import re
import secrets
from collections import OrderedDict

from schemas.errors import InvalidRequest
from schemas.subjects import check_job_id

MAX_REMEMBERED = 10_000

_OURS = re.compile(r"(?:chatcmpl-|cmpl-|req-)?([0-9a-f]{24}(?:-r\d{1,9})?)")


def new_request_key() -> str:
    """24 hex digits, from which a request's ids are made: the caller's own ids never become names on the bus."""
    return secrets.token_hex(12)


def job_id(key: str, prompt: int, num_prompts: int) -> str:
    return f"req-{key}" if num_prompts == 1 else prompt_job_id(f"req-{key}", prompt)


def prompt_job_id(job: str, prompt: int) -> str:
    """The job of one prompt of several, by the id that the job would have if it were the only one."""
    return f"{job}-{prompt}"


class RequestNames:
    """Remembers the latest requests whose clients gave them a name of their own (`X-Request-Id`)."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, str], str] = OrderedDict()

    def remember(self, tenant: str, given: str, key: str) -> None:
        """Of two requests of one name the later one counts."""
        self._keys[tenant, given] = key
        self._keys.move_to_end((tenant, given))
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)

    def job_ids(self, tenant: str, name: str) -> list[str]:
        """The jobs that a client of `tenant` may mean, likeliest first: by an id of ours, its own, or a job's id."""
        found = []
        if ours := _OURS.fullmatch(name):
            found.append(f"req-{ours[1]}")
        if (tenant, name) in self._keys:
            found.append(f"req-{self._keys[tenant, name]}")
        with contextlib.suppress(InvalidRequest):
            found.append(check_job_id(name))
        return list(dict.fromkeys(found))
