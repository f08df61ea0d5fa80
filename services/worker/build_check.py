"""Keeps a worker from serving beside workers of another build by mistake (infra/decisions/0026).

Two builds of one model answer with different tokens. Jobs never change over, but who asks twice gets two answers, so
an operator says that it is meant: `--rolling`.
"""

import logging

from schemas.beat import BEAT_INTERVAL_S, SILENT_AFTER_S, Beat
from schemas.errors import SetupError
from services.bus.beats import BeatTable

log = logging.getLogger(__name__)

LISTEN_S = 1.5 * BEAT_INTERVAL_S
CONFIRM_S = SILENT_AFTER_S + 2 * BEAT_INTERVAL_S  # whoever died just before is silent by then
_SERVING = ("ok", "degraded")


async def wait_for_place(beats: BeatTable, own: Beat) -> None:
    """Returns once a worker with the beat `own` may serve. Raises `SetupError` if that would mix builds.

    `own` must be on the air already: of two builds that start together the one with the lower id goes on, and the
    other waits until that one serves or is gone.
    """
    await beats.wait_for(lambda table: table.listening_s >= LISTEN_S)
    while True:
        if _first_of(beats, own):
            log.info("workers of another build start at the same time: waiting for them")
        await beats.wait_for(lambda table: not _first_of(table, own))
        if rivals := await _steady_rivals(beats, own):
            raise SetupError(_refusal(own, rivals))
        if not _first_of(beats, own):
            return


async def _steady_rivals(beats: BeatTable, own: Beat) -> list[Beat]:
    """Rivals that there are all of `CONFIRM_S` long, by the clock of those who are heard."""
    end_s = beats.listening_s + CONFIRM_S
    await beats.wait_for(lambda table: not _rivals(table, own) or table.listening_s >= end_s)
    return _rivals(beats, own)


def _refusal(own: Beat, rivals: list[Beat]) -> str:
    named = ", ".join(f"{rival.build} ({rival.process} on {rival.host})" for rival in rivals)
    return (
        f"{own.process} has build {own.build} of {own.model}, and another one serves: {named}. Their tokens differ: "
        "use the same weights, tokenizer, compute.dtype and kv.quantisation, or give --rolling to change the build"
    )


def _others(beats: BeatTable, own: Beat) -> list[Beat]:
    """Live workers of the same model, known by their build."""
    live = beats.alive(model=own.model)
    return [beat for beat in live if beat.build and beat.process != own.process]


def _rivals(beats: BeatTable, own: Beat) -> list[Beat]:
    """Those of other builds that serve, unless somebody of our own build serves beside them already."""
    serving = [beat for beat in _others(beats, own) if beat.state in _SERVING]
    if any(beat.build == own.build for beat in serving):
        return []
    return sorted((beat for beat in serving if beat.build != own.build), key=lambda beat: beat.process)


def _first_of(beats: BeatTable, own: Beat) -> list[Beat]:
    """Those that start at the same time and go first."""
    return [beat for beat in _others(beats, own) if beat.state == "warming" and beat.build < own.build]
