"""A pipeline of the tiny model whose workers share a Valkey and nothing else: each has a disk of its own."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.guarded import GuardedTier
from schemas.events import Done
from tests.kvstore.delaying_proxy import DelayingProxy, delayed
from tests.kvstore.valkey import Valkey
from tests.pipeline.local import Answer, LocalPipeline, run_pipeline, settings_for
from tests.pipeline.tiny import tiny_files, tiny_models, tiny_pipeline_text

JOB: dict[str, Any] = {
    "prompt_token_ids": list(range(3, 89)), "max_tokens": 20, "temperature": 0.0, "ignore_eos": True,
}  # fmt: skip
BUDGET_S = 0.4
TIMEOUT_S = 0.3

_salts = itertools.count()


class Site(NamedTuple):
    pipeline: LocalPipeline
    valkey: Valkey
    proxy: DelayingProxy

    @property
    def tiers(self) -> list[GuardedTier]:
        found = [worker.store.tiers[1] for worker in (self.pipeline.prefill, self.pipeline.decode)]
        assert all(isinstance(tier, GuardedTier) for tier in found)
        return found  # type: ignore[return-value]

    async def ask(self) -> Answer:
        """The same prompt under a salt that nobody has seen, so that its blocks are in no worker's pages either."""
        answer = await self.pipeline.ask(**fresh_job())
        assert isinstance(answer.end, Done)
        return answer

    def reasons(self) -> list[str]:
        beats = [worker.process.beat() for worker in (self.pipeline.prefill_worker, self.pipeline.decode_worker)]
        assert all((beat.state == "degraded") == bool(beat.reasons) for beat in beats)
        return [reason for beat in beats for reason in beat.reasons]


def fresh_job() -> dict[str, Any]:
    return JOB | {"cache_salt": f"salt-{next(_salts)}"}


@asynccontextmanager
async def site(
    broker: str, valkey: Valkey, folder: Path, password: str = "", *, one_disk: bool = False, **kv: Any
) -> AsyncIterator[Site]:
    """With `one_disk` they share that as well. `kv` overrides settings."""
    with delayed(valkey.port, 0.0) as proxy:
        kv = {
            "block_tokens": 16,
            "codec": "none",
            "redis_url": proxy.url.replace("//", f"//:{password}@") if password else proxy.url,
            "redis_timeout_s": TIMEOUT_S,
            "fetch_budget_s": BUDGET_S,
            **kv,
        }
        disks = ("both", "both") if one_disk else ("prefill", "decode")
        settings = settings_for(folder / disks[0], kv=kv), settings_for(folder / disks[1], kv=kv)
        models = (tiny_models()[0], tiny_models()[1])
        async with run_pipeline(broker, tiny_files(), tiny_pipeline_text(), models, settings) as pipeline:
            yield Site(pipeline, valkey, proxy)
