"""Two workers disagree about a token: the alarm. What was published stays, the reader has it already."""

import logging

from services import telemetry
from services.engine.recheck import Difference
from services.worker.run import JobRun

log = logging.getLogger(__name__)


def report_differences(run: JobRun, choice: int, differences: list[Difference]) -> None:
    """One error line for each token of `choice` that came out otherwise than the reply subject has it."""
    writers = run.history.writers.get(choice, [])
    for found in differences:
        fields = {
            "tenant": run.tenant,
            "job": run.job,
            "choice": choice,
            "index": found.index,
            "published": found.known,
            "published_by": writers[found.index],
            "computed": "not a number" if found.computed is None else found.computed,
            "computed_by": run.claim,
        }
        log.error("two workers disagree about a token", extra={"fields": fields})
        telemetry.disagreements.add(stage=run.stage)
