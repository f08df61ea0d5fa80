"""`python -m services.text.grammar_check`: compiles schemas that may be hostile, so that their asker need not.

A schema of a hundred bytes can take hours, gigabytes or the whole stack. It takes them here, where that ends with this
process alone. Reads and writes messages (`services.text.framing`): first a `Vocabulary` in msgpack, answered by an
empty message; then each `Source` in JSON, which is answered by what is wrong with it, or by an empty message.
"""

import resource
import signal
import sys
from functools import partial

import msgspec

from schemas.errors import InvalidRequest
from services.text.framing import read_message, write_message
from services.text.grammar import Compiler
from services.text.grammar_source import Source
from services.text.stack import on_stack
from services.text.vocabulary import Vocabulary

MAX_CPU_S = 2.0  # a schema
MAX_MEMORY_BYTES = 2 << 30
STACK_BYTES = 4 << 20  # less than where it is compiled for use


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the asker too, whose end is ours
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(asked)
    if first is None:
        return
    vocabulary = msgspec.msgpack.decode(first, type=Vocabulary)
    compiler = Compiler(vocabulary, _Longest(vocabulary).encode)
    write_message(answers, b"")
    while (source := read_message(asked)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
        answer = on_stack(STACK_BYTES, partial(_verdict, compiler, source))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_message(answers, answer.encode())


def _verdict(compiler: Compiler, source: bytes) -> str:
    try:
        compiler.try_out(msgspec.json.decode(source, type=Source))
    except InvalidRequest as error:
        return error.message
    return ""


class _Longest:
    """Writes a text with the longest token each time: near enough to the model's own way to tell what it costs."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {token: id_ for id_, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids), default=1)

    def encode(self, text: str) -> list[int]:
        data, ids, at = text.encode(), list[int](), 0
        while at < len(data):
            size = next((n for n in range(self._longest, 0, -1) if data[at : at + n] in self._ids), 0)
            if size:
                ids.append(self._ids[data[at : at + size]])
            at += max(size, 1)
        return ids


if __name__ == "__main__":
    main()
