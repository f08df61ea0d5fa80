"""What `kvrelay dead` prints of dead letters: a line, a page, or JSON."""

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec

from services.bus.dead_letters import DeadLetter
from services.cli.printable import on_one_line, printable

MAX_SHOWN_BYTES = 4_096  # of a payload that is no JSON
MAX_REASON_CHARS = 80

LINE = "{seq:>8}  {when:20}  {tenant:12}  {job:36}  {code:20}  {times:>5}  {size:>10}  {reason}"
HEAD = LINE.format(
    seq="SEQ", when="WHEN", tenant="TENANT", job="ID", code="CODE", times="TIMES", size="BYTES", reason="REASON"
)


def line(letter: DeadLetter) -> str:
    """TIMES: how often it was delivered."""
    return LINE.format(
        seq=letter.sequence,
        when=_utc(letter.died_at),
        tenant=letter.tenant,
        job=letter.job,
        code=on_one_line(letter.code),
        times=letter.num_delivered or "?",
        size=letter.payload_bytes,
        reason=on_one_line(letter.reason)[:MAX_REASON_CHARS],
    )


def page(letter: DeadLetter, payload: bytes) -> str:
    """Everything that is stored: headers, then the payload."""
    head = [f"{letter.sequence}: job {letter.job} of tenant {letter.tenant}, {_utc(letter.died_at)}"]
    head += [f"{on_one_line(name)}: {on_one_line(value)}" for name, value in letter.headers.items()]
    return "\n".join([*head, "", _shown(payload)])


def plain(letter: DeadLetter) -> dict[str, Any]:
    """As a line of `--json`. Times are unix seconds."""
    return {
        "seq": letter.sequence,
        "id": letter.job,
        "tenant": letter.tenant,
        "died_at": letter.died_at,
        "code": letter.code,
        "reason": letter.reason,
        "deliveries": letter.num_delivered,
        "origin": letter.origin,
        "subject": letter.subject,
        "bytes": letter.payload_bytes,
        "truncated": letter.is_truncated,
    }


def plain_page(letter: DeadLetter, payload: bytes) -> dict[str, Any]:
    """`payload` is the JSON that was sent; of anything else there is `payload_base64`."""
    shown = {**plain(letter), "headers": dict(letter.headers)}
    try:
        return {**shown, "payload": msgspec.json.decode(payload)}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {**shown, "payload_base64": base64.b64encode(payload).decode()}


def _shown(payload: bytes) -> str:
    try:
        msgspec.json.decode(payload)
        return printable(msgspec.json.format(payload).decode("utf-8", "backslashreplace"))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        rest = len(payload) - MAX_SHOWN_BYTES
        text = printable(payload[:MAX_SHOWN_BYTES].decode("utf-8", "backslashreplace"))
        return f"{text}\n... and {rest} bytes more: --json has them all" if rest > 0 else text


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
