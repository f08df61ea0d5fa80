"""CASES 4: what one tenant stored is found by nobody else; and a control in which it is found."""

from pathlib import Path
from typing import Any

from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines

JOB: dict[str, Any] = GOLDENS["rain for the clerk"].job(
    max_tokens=3
)  # 79 tokens: 4 full blocks and a partial one, which decode fills
KV = {"block_tokens": 16}


async def test_two_tenants_share_no_block_and_one_shares_all_with_himself(pipelines: Pipelines, tmp_path: Path):
    """Also with the other's salt copied into the body: the tenant comes from the subject, a salt only narrows."""
    async with pipelines(kv=KV) as pipeline:
        cold = await pipeline.ask("acme", **JOB)
        salted = await pipeline.ask("acme", **JOB, cache_salt="of acme")
        others = [await pipeline.ask("bolt", **JOB), await pipeline.ask("bolt", **JOB, cache_salt="of acme")]
        again = [await pipeline.ask("acme", **JOB), await pipeline.ask("acme", **JOB, cache_salt="of acme")]
    assert [answer.start.cached_tokens for answer in (cold, salted, *others)] == [0, 0, 0, 0]
    assert [answer.start.cached_tokens for answer in again] == [78, 78], "the control"
    assert len({tuple(answer.token_ids()) for answer in (cold, salted, *others, *again)}) == 1
    names = {
        tenant: {path.name for path in (tmp_path / "kv" / "blocks" / tenant).rglob("*.kvb")}
        for tenant in ("acme", "bolt")
    }
    assert len(names["acme"]) == len(names["bolt"]) == 12
    assert not names["acme"] & names["bolt"], "0 shared blocks"
