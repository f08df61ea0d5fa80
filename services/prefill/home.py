"""A job that another build began goes back to that one: its tokens are that build's, and nobody may mix them."""

from schemas.beat import BUILD_SILENT_AFTER_S
from schemas.errors import BegunElsewhere, BuildGone
from schemas.handoff import Handoff, handed_on
from schemas.subjects import Stage
from services.bus.beats import BeatTable
from services.worker.run import JobRun


class Home:
    """Where jobs of other builds of `model` belong. `text`: how this worker reads a prompt."""

    def __init__(self, beats: BeatTable, model: str, text: str) -> None:
        self._beats = beats
        self._model = model
        self._text = text

    async def send(self, run: JobRun, draft: Handoff) -> None:
        """Queues the job for the build that began it.

        Raises `BuildGone` if that one is silent for too long, and `BegunElsewhere` if it might read the prompt in
        another way than `draft` does: then the message itself must come to one of its workers.
        """
        build = run.begun_by
        assert build is not None
        if self._beats.build_silent_s(self._model, build) > BUILD_SILENT_AFTER_S:
            raise BuildGone(f"the workers of build {build}, which began this job, are gone: send it again")
        if self._text not in {beat.text for beat in self._beats.heard(self._model, build)}:
            raise BegunElsewhere(f"build {build} began this job, and its workers are not heard or read it otherwise")
        home = handed_on(draft, build=build, last=run.history.last, **run.time_left())
        await run.publish(home, Stage.REWORK)
