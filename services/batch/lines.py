"""A batch's input, line by line: what each asks for, what is wrong with it, and in which order to run them."""

import hashlib
import time
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from schemas.batch import ENDPOINTS, MAX_LINES, BatchError
from schemas.errors import InvalidRequest, KvrelayError
from schemas.json_object import read_object
from schemas.wire import find_lone_surrogate, translate

BOM = b"\xef\xbb\xbf"
ORDER_BYTES = 32_768  # of a prompt, that lines are ordered by
LINES_A_TURN = 16  # read in about a millisecond
TURN_S = 0.00005  # long enough for another thread to wake up
PIECE_BYTES = 256  # no more than a KV block's text: what shares less than the first one shares nothing


class Line(msgspec.Struct, frozen=True):
    """`custom_id` and `body` are the bytes that the file has, JSON as the client spelled it."""

    custom_id: msgspec.Raw
    method: str
    url: str
    body: msgspec.Raw


class Place(NamedTuple):
    """A line of the file: its number from 1, and where it lies."""

    number: int
    offset: int
    length: int


class Plan(NamedTuple):
    """`places` in the order in which they should run; `bad`: what cannot run, with its custom_id as far as it can be
    read (JSON), and why. `errors`: why nothing of the file can run.
    """

    places: list[Place]
    bad: list[tuple[Place, bytes, KvrelayError]]
    errors: list[BatchError]

    @property
    def total(self) -> int:
        return len(self.places) + len(self.bad)


class _Prompt(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


class _Named(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")


_line_decoder = msgspec.json.Decoder(Line)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_named_decoder = msgspec.json.Decoder(_Named)


def make_plan(file: BinaryIO, endpoint: str) -> Plan:
    """Reads the whole file once. Lines that begin alike are put together, so that a worker still has what they share.

    A bad line fails alone; two lines with one custom_id, no line at all, or too many of them fail the file.
    """
    keyed: list[tuple[bytes, Place]] = []
    bad: list[tuple[Place, bytes, KvrelayError]] = []
    seen: dict[bytes, int] = {}
    errors: list[BatchError] = []
    for place, data in _lines(file):
        if place.number % LINES_A_TURN == 0:
            time.sleep(TURN_S)  # the other threads of a gateway serve people, and wait no longer for their turn
        if len(keyed) + len(bad) >= MAX_LINES:
            return Plan([], [], [BatchError(code="too_many_lines", message=f"more than {MAX_LINES} lines")])
        try:
            line = parse_line(data, endpoint)
        except InvalidRequest as error:
            named = _custom_id(data)
            bad.append((place, named, type(error)(f"line {place.number}: {error.message}", param=error.param)))
            twice = named if named != b"null" else b""
        else:
            keyed.append((_order_key(line), place))
            twice = bytes(line.custom_id)
        if twice:
            _note(twice, place.number, seen, errors)
    if not keyed and not bad:
        errors.append(BatchError(code="empty_file", message="the file has no lines"))
    keyed.sort()
    return Plan([place for _, place in keyed], bad, errors)


def read_line(file: BinaryIO, place: Place) -> bytes:
    file.seek(place.offset)
    return file.read(place.length)


def parse_line(data: bytes, endpoint: str) -> Line:
    """Raises `InvalidRequest`; what is wrong with its body is found out later."""
    fields = read_object(data)
    if not isinstance(fields.get("custom_id"), str):
        raise InvalidRequest("custom_id must be a string", param="custom_id")
    line = translate(_line_decoder, data)
    if line.method != "POST":
        raise InvalidRequest("method must be POST", param="method")
    if line.url != endpoint or endpoint not in ENDPOINTS:
        raise InvalidRequest(f"url must be {endpoint}, as the batch says", param="url")
    body = fields["body"]
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("a line of a batch cannot be streamed", param="body.stream")
    return line


def _lines(file: BinaryIO) -> Iterator[tuple[Place, bytes]]:
    """Lines end with LF or CRLF, and with nothing else; blank ones are none."""
    offset = 0
    for number, raw in enumerate(file, 1):
        skip = len(BOM) if number == 1 and raw.startswith(BOM) else 0
        data = raw[skip:].rstrip(b"\r\n")
        if data.strip(b" \t"):
            yield Place(number, offset + skip, len(data)), data
        offset += len(raw)


def _note(custom_id: bytes, number: int, seen: dict[bytes, int], errors: list[BatchError]) -> None:
    """Equal as text: two spellings of one id are one."""
    text: str = msgspec.json.decode(custom_id) if b"\\" not in custom_id else read_object(b'{"a":%b}' % custom_id)["a"]
    name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    before = seen.setdefault(name, number)
    if before != number:
        message = f"lines {before} and {number} have the same custom_id"
        errors.append(BatchError(code="duplicate_custom_id", message=message, line=number, param="custom_id"))


def _custom_id(data: bytes) -> bytes:
    """As far as it can be told of a bad line: as it is spelled there, or anew where something else is no text."""
    try:
        name = read_object(data).get("custom_id")
    except KvrelayError:
        return b"null"
    if not isinstance(name, str) or find_lone_surrogate(name) is not None:
        return b"null"
    try:
        return bytes(translate(_named_decoder, data).custom_id)
    except KvrelayError:
        return msgspec.json.encode(name)


def _order_key(line: Line) -> bytes:
    """Sorted by it, lines lie beside those that they share most of their beginning with: its first bytes as they are,
    and a hash of each piece behind them.
    """
    try:
        found = translate(_prompt_decoder, bytes(line.body))
    except KvrelayError:
        return b""
    prompt = bytes(found.messages or found.prompt)[:ORDER_BYTES]
    pieces = (prompt[at : at + PIECE_BYTES] for at in range(PIECE_BYTES, len(prompt), PIECE_BYTES))
    hashes = (hashlib.blake2b(piece, digest_size=6).digest() for piece in pieces)
    return b"".join((found.model, found.cache_salt, prompt[:PIECE_BYTES], *hashes))
