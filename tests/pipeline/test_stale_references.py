"""CASES 2: a hand-off whose blocks are not what it says they are. The answer is the cold run's, and it is counted."""

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.blob import BlobFormat
from kvstore.codec import PLAIN
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from schemas.blob import ElementType
from schemas.events import Event
from schemas.subjects import Lane
from services import telemetry
from services.bus.history import read_all
from services.bus.publish import publish_handoff
from tests.bus.polling import until
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import continued, handoff_of, leave
from tests.pipeline.local import Answer, LocalPipeline
from tests.pipeline.tiny import HEAD_DIM, KV_HEADS, LAYERS

JOB: dict[str, Any] = {
    "prompt_token_ids": list(range(3, 45)), "max_tokens": 8, "seed": 1, "ignore_eos": True,
}  # fmt: skip  # two full blocks of 16 and a partial one
OTHER: dict[str, Any] = {**JOB, "prompt_token_ids": list(range(103, 145))}
NUM_BLOCKS = 3


@pytest.fixture
def failed_loads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    counted: list[float] = []
    monkeypatch.setattr(telemetry.failed_loads, "_add", lambda value, _: counted.append(value))
    return counted


def files_of(pipeline: LocalPipeline, job: dict[str, Any]) -> list[Path]:
    """The stored blocks of its prompt, in order."""
    (tier,) = pipeline.decode.store.tiers
    refs = pipeline.decode.blocks.refs("default", "", job["prompt_token_ids"])
    return [Path(tier.inner.path(ref.name)) for ref in refs]  # type: ignore[attr-defined]


def keep(pipeline: LocalPipeline) -> None:
    """The control: they are as promised."""


def forget(pipeline: LocalPipeline) -> None:
    for file in files_of(pipeline, JOB):
        file.unlink()


def hold_another_prompt(pipeline: LocalPipeline) -> None:
    for file, other in zip(files_of(pipeline, JOB), files_of(pipeline, OTHER), strict=True):
        file.write_bytes(other.read_bytes())


def have_another_shape(pipeline: LocalPipeline) -> None:
    """A sound blob of this very key and identity, of a model with one layer more."""
    refs: list[BlockRef] = pipeline.decode.blocks.refs("default", "", JOB["prompt_token_ids"])
    geometry = Geometry(LAYERS + 1, KV_HEADS, HEAD_DIM, ElementType.BFLOAT16)
    identity = pipeline.decode.blocks._identity
    for ref, file in zip(refs, files_of(pipeline, JOB), strict=True):
        payload = memoryview(bytes(geometry.payload_bytes(ref.num_tokens)))
        file.write_bytes(b"".join(BlobFormat(identity, geometry, PLAIN).seal(ref, payload)))


def outlive_the_lease(pipeline: LocalPipeline) -> None:
    for file in files_of(pipeline, JOB):
        os.utime(file, (0, 0))


async def stored(pipelines: Pipelines) -> list[Event]:
    """The stream of `JOB`; its blocks are in the store, and those of `OTHER`, and in no worker's memory."""
    async with pipelines() as pipeline:
        await pipeline.ask(**OTHER)
        return (await pipeline.ask(**JOB)).events


async def test_blocks_that_are_not_what_was_promised(tiny_pipelines: Pipelines, failed_loads: list[float]):
    """Consumed and gone; holding another prompt's bytes; of another shape; past their lease. Rework heals each."""
    events = await stored(tiny_pipelines)
    for spoil in (keep, forget, hold_another_prompt, have_another_shape, outlive_the_lease):
        failed_loads.clear()
        async with tiny_pipelines() as pipeline:
            spoil(pipeline)
            answer = await continued(pipeline, JOB, events[:2])
        assert answer.essence == tokens_of(events), spoil.__name__
        assert failed_loads == ([] if spoil is keep else [1]), spoil.__name__


async def test_a_reference_to_blocks_that_never_were(tiny_pipelines: Pipelines, failed_loads: list[float]):
    events = await stored(tiny_pipelines)
    async with tiny_pipelines() as pipeline:
        answer = await continued(pipeline, JOB, events[:2], salt="nobody stored with this one")
        assert answer.essence == tokens_of(events)
        assert failed_loads == [1]


async def test_a_wrong_count_of_blocks(tiny_pipelines: Pipelines):
    """Of blocks that are there, and of blocks that are not."""
    events = await stored(tiny_pipelines)
    async with tiny_pipelines() as pipeline:
        for count in (0, NUM_BLOCKS - 1, NUM_BLOCKS + 4, -1):
            for salt in ("", f"nothing is stored for {count}"):
                answer = await continued(pipeline, JOB, events[:2], salt=salt, stored_blocks=count)
                assert answer.essence == tokens_of(events)


async def test_a_reference_used_again_says_nothing(tiny_pipelines: Pipelines):
    """The hand-off of a job that has ended comes once more, under another message id."""
    events = await stored(tiny_pipelines)
    async with tiny_pipelines() as pipeline:
        handoff = handoff_of(pipeline, JOB, events)
        name = await leave(pipeline, handoff, events[:2])
        first = await pipeline.read(name)
        before = await read_all(pipeline.bus, "default", name)
        await publish_handoff(pipeline.bus, replace(handoff, hop=7), pipeline.text.slug, Lane.INTERACTIVE)
        await until(lambda: _is_idle(pipeline))
        assert await read_all(pipeline.bus, "default", name) == before
        assert first.essence == tokens_of(events)


async def _is_idle(pipeline: LocalPipeline) -> bool:
    return await pipeline.decode_worker.process._is_queue_empty()


def tokens_of(events: list[Event]) -> list[Event]:
    return Answer(events).essence
