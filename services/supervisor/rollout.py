"""A rolling restart: every worker is replaced by a new one that serves before the old one is told to go.

In rounds of one worker of each role: should the build change, new jobs need both kinds of the new one while begun
jobs still have both of the old one. Prefill goes first, so that nothing comes any more when decode finishes its queue.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from schemas.beat import Beat
from schemas.errors import SetupError
from services.bus.beats import BeatTable
from services.supervisor.child import Child, Program

Pair = tuple[Child, Program]


class Newcomer(NamedTuple):
    """A worker that was started in place of `old`; `keeping` runs its `keep`."""

    old: Child
    child: Child
    keeping: asyncio.Task[None]

    @property
    def has_failed(self) -> bool:
        return self.keeping.done() or self.child.restarts > 0 or self.child.has_exited


class Rollout:
    """`start` begins a child; `replace` makes it the one that counts; `say` tells of each step."""

    def __init__(
        self,
        beats: BeatTable,
        grace_s: float,
        start: Callable[[Child, Program], Newcomer],
        replace: Callable[[Newcomer], None],
        say: Callable[[str], None],
    ) -> None:
        self._beats = beats
        self._grace_s = grace_s
        self._start = start
        self._replace = replace
        self._say = say

    async def run(self, pairs: Sequence[Pair]) -> None:
        """Raises `SetupError` when a new worker cannot serve; those that are not replaced yet go on."""
        for members in rounds(pairs):
            self._say("starting " + ", ".join(old.name for old, _ in members))
            newcomers = [self._start(old, program) for old, program in members]
            try:
                for newcomer in newcomers:
                    await self._until_it_serves(newcomer)
            except SetupError:
                await asyncio.gather(*(newcomer.child.stop(self._grace_s) for newcomer in newcomers))
                await asyncio.gather(*(newcomer.keeping for newcomer in newcomers), return_exceptions=True)
                raise
            for newcomer in newcomers:
                self._say(f"draining the old {newcomer.old.name}")
                self._replace(newcomer)
                await newcomer.old.stop(self._grace_s)

    async def _until_it_serves(self, newcomer: Newcomer) -> None:
        name = newcomer.child.name
        await self._beats.wait_for(
            lambda _: newcomer.has_failed or self._serves(newcomer) or self._reads_otherwise(newcomer)
        )
        if newcomer.has_failed:
            raise SetupError(f"the new {name} cannot start; its log says why")
        if self._reads_otherwise(newcomer):
            raise SetupError(
                f"the new {name} reads prompts in another way than the gateway (another tokenizer or context length): "
                "stop `kvrelay up` and start it again instead"
            )

    def _serves(self, newcomer: Newcomer) -> bool:
        beat = self._beat_of(newcomer.child)
        return beat is not None and beat.state in ("ok", "degraded")

    def _reads_otherwise(self, newcomer: Newcomer) -> bool:
        new, old = self._beat_of(newcomer.child), self._beat_of(newcomer.old)
        return new is not None and old is not None and "" not in (new.text, old.text) and new.text != old.text

    def _beat_of(self, child: Child) -> Beat | None:
        here = socket.gethostname()
        return next((beat for beat in self._beats.alive() if (beat.pid, beat.host) == (child.pid, here)), None)


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """One worker of each role a round, prefill first."""
    roles = [[pair for pair in pairs if pair[0].name.startswith(role)] for role in ("prefill", "decode", "both")]
    return [[pair for pair in members if pair] for members in itertools.zip_longest(*roles)]
