"""CASES 4: what one tenant stored is found by nobody else; and a control in which it is found."""

from pathlib import Path
from typing import Any

import aiohttp

from services.gateway import key_file
from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from tests.golden.goldens import GOLDENS
from tests.pipeline.conftest import Pipelines
from tests.pipeline.tiny import SLUG

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


async def test_over_http_the_key_says_whose_blocks_are_found(tiny_pipelines: Pipelines, tmp_path: Path):
    """Whatever the body says of tenants, users and salts."""
    file = tmp_path / "keys.json"
    keys = {tenant: key_file.add(file, tenant) for tenant in ("acme", "bolt")}
    body = {"model": SLUG, "prompt": "The library opens at nine. " * 6, "max_tokens": 3, "temperature": 0}
    async with tiny_pipelines() as pipeline, aiohttp.ClientSession() as session:
        settings = Settings(api=Api(port=0, keys_file=str(file)))
        gateway = Gateway(settings, pipeline.bus, "gateway-tenants", {SLUG: pipeline.text})
        await gateway.start()

        async def cached(whose: str, **more: Any) -> int:
            headers = {"Authorization": f"Bearer {keys[whose]}"}
            async with session.post(
                f"{gateway.url}/v1/completions", json={**body, **more}, headers=headers
            ) as response:
                assert response.status == 200, await response.text()
                return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

        try:
            found = [await cached("acme"), await cached("bolt"), await cached("bolt", user="acme", tenant="acme")]
            assert found[:2] == [0, 0]
            assert found[2] > 0, "its own by now"
            assert await cached("acme") == found[2], "the control"
            assert await cached("bolt", cache_salt="acme") == 0
        finally:
            await gateway.close()
