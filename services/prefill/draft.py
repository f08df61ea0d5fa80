"""A message of the prefill or the rework queue as it is known before the job's history: read, resolved, looked up."""

from typing import NamedTuple

from schemas.handoff import Handoff
from schemas.job import Job
from services.engine.blocks import Lookup


class Draft(NamedTuple):
    """`handoff` is the job, resolved: without first tokens if `message` is a job, `message` itself if it comes back
    for rework. `lookup` asks the store for the prompt's blocks."""

    message: Job | Handoff
    handoff: Handoff
    lookup: Lookup
