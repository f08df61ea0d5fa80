"""However the wire is cut into reads, each listener gets its messages, and nats-py the others, all in order."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.bus import skimmer as skimmer_module
from services.bus.client import ReconnectingClient
from services.bus.skimmer import SkimmingParser

HEADERS = b"NATS/1.0\r\nA: b\r\n\r\n"
Message = tuple[int, bytes, bytes]


class Others:
    """Stands for nats-py's client: what its parser hands on."""

    def __init__(self, got: list[Message]) -> None:
        self._got = got

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._got.append((sid, data, headers or b""))

    async def _process_ping(self) -> None:
        self._got.append((0, b"", b""))


def on_the_wire(message: Message) -> bytes:
    sid, payload, headers = message
    if sid == 0:
        return b"PING\r\n"
    reply = b"to.me " if sid % 2 else b""
    if not headers:
        return b"MSG a.b %d %b%d\r\n%b\r\n" % (sid, reply, len(payload), payload)
    sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
    return b"HMSG a.b %d %b%b\r\n%b%b\r\n" % (sid, reply, sizes, headers, payload)


def listener(got: list[Message], sid: int) -> Any:
    return lambda payload, headers: got.append((sid, payload, headers))


payloads = st.sampled_from([b"", b"x", b"\r\n", b"HMSG a 1 2 3\r\n", b"y" * 40, b"z" * 300])
messages = st.one_of(
    st.just((0, b"", b"")),
    st.tuples(st.integers(1, 4), payloads, st.sampled_from([HEADERS, HEADERS[:-2] + b"C: d\r\n\r\n"])),
    st.tuples(st.integers(3, 4), payloads, st.just(b"")),  # listeners' messages have headers
)


@given(st.lists(messages, max_size=12), st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(10, 400))
async def test_every_message_arrives_in_order(sent: list[Message], sizes: list[int], max_kept: int) -> None:
    got: list[Message] = []
    parser = SkimmingParser(Others(got), {b"1": listener(got, 1), b"2": listener(got, 2)})
    before, skimmer_module.MAX_KEPT_BYTES = skimmer_module.MAX_KEPT_BYTES, max_kept
    try:
        wire = b"".join(map(on_the_wire, sent))
        while wire:
            size = sizes[len(wire) % len(sizes)]
            await parser.parse(wire[:size])
            wire = wire[size:]
    finally:
        skimmer_module.MAX_KEPT_BYTES = before
    assert got == sent


def test_headers_are_read_as_nats_py_reads_them() -> None:
    raw = b"A: b\r\nB:c\r\nC:\t d e \r\nD : f\r\nE E: g\r\nno colon\r\n\xff: h\r\nF: \xff\r\nG: i: j\r\n\r\n"
    expected = {"A": "b", "B": "c", "C": "d e", "D": "f", "F": "\ufffd", "G": "i: j"}
    assert ReconnectingClient._parse_header_lines(raw) == expected
    assert ReconnectingClient.__bases__[0]._parse_header_lines(raw) == expected
