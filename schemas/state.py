"""The states of a job, and the only table of the steps between them.

A state is told from what is stored (`services.bus.job_state`); nobody keeps one. A step is one event, or the settling
of the job's queue message; who looks now and then may see several steps as one. Events expire
(`bus.replies_max_age_s`), and a crashed broker may forget the last of them: then a job is seen where it was before.
"""

import enum


class JobState(enum.StrEnum):
    """`UNKNOWN`: nobody has written of the job. A job that came over NATS is that until a worker has it."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return not STEPS[self]


_STOPPED = {JobState.FAILED, JobState.CANCELLED}  # at any point of its life

STEPS: dict[JobState, frozenset[JobState]] = {
    JobState.UNKNOWN: frozenset({JobState.QUEUED, JobState.PREFILLING, *_STOPPED}),
    JobState.QUEUED: frozenset({JobState.PREFILLING, *_STOPPED}),
    # Decode may begin before prefill has settled; a job of one token ends here.
    JobState.PREFILLING: frozenset({JobState.HANDED_OFF, JobState.DECODING, JobState.DONE, *_STOPPED}),
    # Back to prefill: its blocks were lost, or a delivery that was not settled came again.
    JobState.HANDED_OFF: frozenset({JobState.DECODING, JobState.PREFILLING, *_STOPPED}),
    JobState.DECODING: frozenset({JobState.PREFILLING, JobState.DONE, *_STOPPED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def may_become(before: JobState, after: JobState) -> bool:
    """Whether someone who saw `before` may see `after` later: no step, one, or several."""
    reached, frontier = {before}, {before}
    while frontier:
        frontier = {state for step in frontier for state in STEPS[step]} - reached
        reached |= frontier
    return after in reached
