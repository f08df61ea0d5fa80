"""One more worker of a stage, beside those of a pipeline of the tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from schemas.subjects import Stage
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker.runtime import Runtime
from tests.pipeline.local import LocalPipeline, LocalWorker, run_worker
from tests.pipeline.tiny import tiny_files, tiny_models, tiny_pipeline_text


@asynccontextmanager
async def second_worker(
    pipeline: LocalPipeline, stage: Stage, max_sequences: int | None = None
) -> AsyncIterator[LocalWorker]:
    make_role = DecodeRole if stage is Stage.DECODE else PrefillRole
    settings = pipeline.decode.settings
    if max_sequences is not None:
        scheduler = replace(settings.scheduler, max_sequences=max_sequences)
        settings = replace(settings, scheduler=scheduler)
    runtime = Runtime(settings, tiny_files(), tiny_pipeline_text(), tiny_models()[2])
    async with run_worker(pipeline.url, runtime, make_role) as worker:
        await pipeline.decode_worker.publisher.beat()  # a prefill worker takes jobs from when it heard one
        yield worker
