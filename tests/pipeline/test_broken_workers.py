"""Faults inside a worker reach the reader as an error, and nobody else's job (CASES 18)."""

import asyncio
from typing import Any

import pytest

from schemas.errors import KvUnavailable
from schemas.events import Done, Error, Retry
from schemas.subjects import Stage
from services.engine.blocks import Blocks
from tests.pipeline.conftest import Pipelines

SALT = "breaks the worker"
JOB: dict[str, Any] = {"prompt_token_ids": list(range(3, 40)), "max_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
@pytest.mark.parametrize(
    ("error", "code"),
    [(ZeroDivisionError("a bug"), "poisoned"), (KvUnavailable("lost"), "kv_unavailable")],
    ids=["unknown", "final"],
)
async def test_what_goes_wrong_with_one_job_ends_it_and_no_other(
    tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch, stage: Stage, error: Exception, code: str
) -> None:
    """Raised while its blocks are merged. What may work elsewhere is tried again, alone at last, and given up."""
    async with tiny_pipelines() as pipeline:
        broken = (pipeline.decode if stage is Stage.DECODE else pipeline.prefill).blocks
        refs = Blocks.refs

        def failing(blocks: Blocks, tenant: str, salt: str, token_ids: Any) -> Any:
            if salt == SALT and blocks is broken:
                raise error
            return refs(blocks, tenant, salt, token_ids)

        monkeypatch.setattr(Blocks, "refs", failing)
        bad = await pipeline.submit(**JOB, cache_salt=SALT)
        mates = [await pipeline.submit(**{**JOB, "max_tokens": 60, "seed": seed}) for seed in range(4)]
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(pipeline.read(job) for job in [bad, *mates]))
        end = answers[0].end
        assert isinstance(end, Error) and end.code == code
        assert sum(isinstance(event, Retry) for event in answers[0].events) == (3 if code == "poisoned" else 0)
        assert all(isinstance(answer.end, Done) for answer in answers[1:])
