"""What a worker that died left behind: events on the reply subject under its claim, and the job on a queue."""

import itertools
from typing import Any

from msgspec import structs

from schemas.events import Event, Start, Token
from schemas.handoff import FirstToken, Handoff
from schemas.job import Sampling
from schemas.subjects import Lane, Stage, derived_job_id, stream_name
from services.bus.facts import StreamFacts
from services.bus.jetstream import call
from services.bus.publish import publish_handoff
from services.bus.replies import ReplyWriter
from tests.pipeline.local import Answer, LocalPipeline

PREFILL_CLAIM = "prefill.0.1"
DECODE_CLAIM = "decode.1.1"

_numbers = itertools.count()


def handoff_of(pipeline: LocalPipeline, job: dict[str, Any], events: list[Event], **changes: Any) -> Handoff:
    """The hand-off that prefill made of `job`, whose stream begins with `events`; its id is not `job`'s."""
    start = next(event for event in events if isinstance(event, Start))
    fields = {name: job[name] for name in Sampling.__struct_fields__ if name in job}
    prompt = job["prompt_token_ids"]
    plain: dict[str, Any] = {
        "tenant": "default",
        "job": f"left-{next(_numbers)}",
        "origin": start.origin,
        "digest": start.digest,
        "build": start.build,
        "hop": 1,
        "last": 0,
        "timeout_left_s": 600.0,
        "prompt_token_ids": prompt,
        "sampling": Sampling(**{**fields, "seed": start.seed}),
        "first": [FirstToken(e.choice, e.id, e.logprobs) for e in events if isinstance(e, Token) and e.index == 0],
        "stored_blocks": pipeline.prefill.pages_for(len(prompt)),
        "cached_tokens": start.cached_tokens,
    }
    return Handoff(**{**plain, **changes})


async def leave(pipeline: LocalPipeline, handoff: Handoff, events: list[Event], stage: Stage = Stage.DECODE) -> str:
    """Writes `events`, publishes `handoff`; the job's id, whose stream goes on from there."""
    await write(pipeline, handoff, events)
    await publish_handoff(pipeline.bus, handoff, pipeline.text.slug, Lane.INTERACTIVE, stage)
    return handoff.job


async def write(pipeline: LocalPipeline, handoff: Handoff, events: list[Event]) -> None:
    last = 0
    first, later = split(events)
    for claim, written in ((PREFILL_CLAIM, first), (DECODE_CLAIM, later)):
        writer = ReplyWriter(pipeline.bus, handoff.tenant, handoff.job, last, claim)
        writer.put(*written)
        last = await writer.drained()
        writer.close()


async def leave_to_prefill(pipeline: LocalPipeline, job: dict[str, Any], events: list[Event]) -> str:
    """The same for a prefill worker that died: the job is on the prefill queue. Nobody else may publish there."""
    stream = stream_name(Stage.PREFILL, pipeline.text.slug)
    sequence = (await call(pipeline.bus, f"STREAM.INFO.{stream}"))["state"]["last_seq"] + 1
    origin = derived_job_id(sequence, await pipeline.bus.part(StreamFacts).created_ms(stream))
    name = f"left-{next(_numbers)}"
    writer = ReplyWriter(pipeline.bus, "default", name, 0, PREFILL_CLAIM)
    writer.put(*(structs.replace(e, job=name, origin=origin) if isinstance(e, Start) else e for e in events))
    await writer.drained()
    writer.close()
    return await pipeline.submit(**job, id=name)


async def continued(pipeline: LocalPipeline, job: dict[str, Any], events: list[Event], **changes: Any) -> Answer:
    """The whole stream of a job whose decode worker died after `events`."""
    return await pipeline.read(await leave(pipeline, handoff_of(pipeline, job, events, **changes), events))


def split(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """What prefill writes, which is all up to the last first token, and what decode writes."""
    firsts = [n for n, event in enumerate(events) if not isinstance(event, Token) or event.index == 0]
    num_prefill = next((n for n, place in enumerate(firsts) if n != place), len(firsts))
    return events[:num_prefill], events[num_prefill:]
