"""Grammars for a model, by what is wanted of an answer: checked where a schema can do no harm, compiled, and kept.

Everything waits on one thread, so that a schema that takes long holds up other schemas and nothing else.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from schemas.errors import Internal, InvalidRequest
from schemas.response_format import Constrained, not_followed
from services.text.framing import read_message, write_message
from services.text.grammar_source import Source
from services.text.stack import DEEP, on_stack
from services.text.tokenizer import Tokenizer
from services.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from services.text.grammar import Compiler, Grammar

MAX_KEPT = 8  # grammars: one may grow to some 40 MB
MAX_VERDICTS = 256  # with their schemas, of at most 64 kB

_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # any other end is the schema's doing

V = TypeVar("V")


class Grammars:
    """Of one model. What it needs is made when it is first asked for something."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._eos_ids = eos_ids
        self._verdicts: _Latest[str] = _Latest(MAX_VERDICTS)
        self._kept: _Latest[Grammar] = _Latest(MAX_KEPT)
        self._checker: _Checker | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def check(self, wanted: Constrained) -> None:
        """Raises `InvalidRequest` that says why an answer cannot be held to `wanted`."""
        await self._on_thread(lambda: self._check(_source(wanted)))

    async def of(self, wanted: Constrained, *, is_checked: bool) -> "Grammar":
        """`is_checked`: somebody of ours has checked it. Raises `InvalidRequest`."""
        return await self._on_thread(lambda: self._of(_source(wanted), is_checked))

    async def _on_thread(self, call: Callable[[], V]) -> V:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        if not self._eos_ids:
            raise InvalidRequest("response_format needs a model with an end token", param="response_format")
        return Vocabulary.of(self._tokenizer, self._size, self._eos_ids)

    @cached_property
    def _compiler(self) -> "Compiler":
        # Here, since who only checks needs neither the library nor numpy: a gateway starts without them.
        from services.text.grammar import Compiler

        return Compiler(self._vocabulary, self._tokenizer.encode)

    def _check(self, source: bytes) -> None:
        why = self._verdicts.get(source)
        if why is None:
            why = self._verdicts.put(source, self._asked(source))
        if why:
            raise InvalidRequest(why, param="response_format")

    def _asked(self, source: bytes) -> str:
        """What is wrong with a schema, or nothing."""
        for _ in range(2):
            if self._checker is None:
                self._checker = _Checker(self._vocabulary)
            checker = self._checker
            why = checker.ask(source)
            if why is not None:
                return why
            self._checker = None
            if checker.ended_by not in _BY_OTHERS:
                return not_followed("the schema is too complex: its grammar takes too long or too much memory").message
        raise Internal("the process that checks schemas was killed twice")

    def _of(self, source: bytes, is_checked: bool) -> "Grammar":
        if not is_checked:
            self._check(source)
        kept = self._kept.get(source)
        if kept is None or kept.is_spent:
            decoded = msgspec.json.decode(source, type=Source)
            kept = self._kept.put(source, on_stack(DEEP, lambda: self._compiler.compile(decoded)))
        return kept


class _Checker:
    """A `services.text.grammar_check` that runs. It ends with this object, and with this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        command = [sys.executable, "-P", "-m", "services.text.grammar_check"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._asked, self._answers = process.stdin, process.stdout
        self._end = weakref.finalize(self, _end, process)
        if self._exchange(msgspec.msgpack.encode(vocabulary)) is None:
            raise Internal("the process that checks schemas does not start")

    def ask(self, source: bytes) -> str | None:
        """What is wrong with the schema; None where that killed the process."""
        answer = self._exchange(source)
        return None if answer is None else answer.decode()

    @property
    def ended_by(self) -> int:
        """The signal that ended it, or 0."""
        return max(0, -(self._process.returncode or 0))

    def _exchange(self, data: bytes) -> bytes | None:
        try:
            write_message(self._asked, data)
            answer = read_message(self._answers)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._process.wait()
            self._end()
        return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()


class _Latest(Generic[V]):
    """The values that were asked for last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: bytes, value: V) -> V:
        self._values[key] = value
        if len(self._values) > self._size:
            self._values.popitem(last=False)
        return value


def _source(wanted: Constrained) -> bytes:
    return msgspec.json.encode(Source.of(wanted))
