"""A broker that stops answering for a while: jobs pause when enough waits for it, and go on where they were."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from schemas.events import Done
from services.bus import replies as replies_module
from tests.bus.polling import until
from tests.bus.throwaway import throwaway_server
from tests.pipeline.conftest import Pipelines

MAX_WAITING_TOKENS = 24
NUM_CHOICES = 2
JOB = {
    "prompt_token_ids": [3, 4, 5, 6], "max_tokens": 80, "n": NUM_CHOICES, "seed": 1, "ignore_eos": True,
}  # fmt: skip


async def test_a_sequence_pauses_while_its_tokens_wait(
    tiny_pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies_module, "MAX_WAITING_TOKENS", MAX_WAITING_TOKENS)
    with throwaway_server(tmp_path / "broker") as server:
        assert server.pid is not None
        async with tiny_pipelines(url=server.url, bus={"ack_wait_s": 30.0}) as pipeline:
            whole = await pipeline.ask(**JOB)
            job = await pipeline.submit(**JOB)
            runs = pipeline.decode_worker.process._runs

            async def has_token() -> bool:
                run = runs.get("default", job)
                return run is not None and run.writer.published

            await until(has_token)
            writer, progress = next(iter(runs)).writer, pipeline.decode_worker.role.batch.progress
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await until(lambda: is_true(writer.congested))
                await until(lambda: is_true(progress._resting))
                steps = progress.steps
                await asyncio.sleep(0.1)  # many steps' time
                assert progress.steps == steps and writer.congested and not writer.closed
                in_flight = writer._in_flight.tokens if writer._in_flight else 0
                assert writer._waiting.num_tokens + in_flight < MAX_WAITING_TOKENS + NUM_CHOICES
            finally:
                os.kill(server.pid, signal.SIGCONT)
            answer = await pipeline.read(job)
            assert answer.essence == whole.essence and isinstance(answer.end, Done)


async def is_true(value: bool) -> bool:
    return value
