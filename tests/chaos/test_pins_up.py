"""`kvrelay kv pin` and `explain` against real processes, through a restart with another build."""

import json
from pathlib import Path

import pytest

from tests.chaos.up import Up, running_up
from tests.golden.passages import SYSTEM

QUESTION = "When does the library open?"


async def explained(up: Up, dtype: str, *options: str) -> dict[str, object]:
    arguments = ("kv", "explain", QUESTION, "--system", SYSTEM, "--dtype", dtype, "--json", *options)
    found: dict[str, object] = json.loads((await up.kvrelay(*arguments))[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(250)
async def test_a_shared_pin_is_warm_for_every_tenant_and_for_the_next_build(tmp_path: Path):
    async with running_up(tmp_path, "--dtype", "bfloat16") as up:
        pinned = json.loads((await up.kvrelay("kv", "pin", "--system", SYSTEM, "--shared", "--json"))[-1])
        assert (pinned["tokens"], pinned["stored"], pinned["blocks"]) == (64, 1, 1)
        for tenant in ("acme", "bolt"):
            said = await up.kvrelay("generate", QUESTION, "--system", SYSTEM, "--tenant", tenant)
            assert "79 prompt tokens (64 cached)" in said[-1]
        found = await explained(up, "bfloat16", "--tenant", "acme")
        assert found["cached_tokens"] == 78
        assert (await up.kvrelay("kv", "verify"))[-1].endswith("0 damaged")
        assert await up.stop() == 0
    async with running_up(tmp_path, "--dtype", "float32") as up:
        again = json.loads((await up.kvrelay("kv", "pin", "--system", SYSTEM, "--shared", "--json"))[-1])
        assert (again["id"], again["stored"]) == (pinned["id"], 1)
        found = await explained(up, "float32", "--tenant", "acme")
        blocks = found["blocks"]
        assert isinstance(blocks, list)
        assert [block["state"] for block in blocks] == ["held", "other_dtype"]
        assert await up.stop() == 0
