"""The other workers that this one works with: those of its own build, as their beats tell."""

from schemas.beat import BEAT_INTERVAL_S, Beat, ProcessRole, stages_of
from services.bus.beats import BeatTable

LAST_BEAT_S = 1.5 * BEAT_INTERVAL_S


class Peers:
    """`feeds`: who takes on what this worker makes of a job; None for the last stage."""

    def __init__(
        self, beats: BeatTable, process: str, role: ProcessRole, feeds: ProcessRole | None, build: tuple[str, str]
    ) -> None:
        """`build`: the model and the build."""
        self._beats = beats
        self._process = process
        self._role = role
        self._feeds = feeds
        self._build = build

    @property
    def is_last_stage(self) -> bool:
        return self._feeds is None

    def take_over(self) -> bool:
        """Whether other workers take what this one hands back."""
        return all(self._others(self._beats.working(stage, *self._build)) for stage in stages_of(self._role))

    def take_on(self) -> bool:
        """Whether somebody takes on what this worker makes of a job. A job ends on the build that began it, so it is
        better begun elsewhere when its own build leaves."""
        return self._feeds is None or bool(self._beats.working(self._feeds, *self._build))

    def are_all_at(self, place: str) -> bool:
        """Whether every worker of the build finds what is stored in the folder that is named so."""
        return place != "" and all(beat.place == place for beat in self._beats.alive(None, *self._build))

    async def wait_for_taker(self) -> None:
        """Returns once `take_on`."""
        await self._beats.wait_for(lambda _: self.take_on())

    async def wait_for_no_taker(self) -> None:
        await self._beats.wait_for(lambda _: not self.take_on())

    def feed_no_more(self, draining_s: float) -> bool:
        """Whether no other prefill worker will add to the decode queue, `draining_s` after it could hear that we drain.

        Then it takes no more jobs, and its next beat tells of those that it had.
        """
        feeders = self._others(self._beats.alive("prefill", *self._build))
        if draining_s < LAST_BEAT_S and any(beat.state != "draining" for beat in feeders):
            return False
        return not any(beat.running for beat in feeders)

    def _others(self, beats: list[Beat]) -> list[Beat]:
        return [beat for beat in beats if beat.process != self._process]
