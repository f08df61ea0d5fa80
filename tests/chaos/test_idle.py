"""What a pipeline costs that has nothing to do."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.up import running_up
from tests.chaos.vitals import cpu_s

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

SETTLE_S = 5.0
WINDOW_S = 20.0
MAX_SHARE = 0.01  # of one core, all processes together


async def test_an_idle_pipeline_uses_at_most_a_hundredth_of_a_core(tmp_path: Path) -> None:
    """Time on a core, which does not depend on how fast or busy the machine is as a duration would."""
    async with running_up(tmp_path, KVRELAY_API_METRICS_PORT="0") as up:
        pids = {"up": up.process.pid, **{name: up.pid(name) for name in up.names}}
        await asyncio.sleep(SETTLE_S)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        await asyncio.sleep(WINDOW_S)
        shares = {name: (cpu_s(pid) - before[name]) / WINDOW_S for name, pid in pids.items()}
    told = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    print(f"\nidle: {sum(shares.values()):.2%} of a core ({told})")
    assert sum(shares.values()) <= MAX_SHARE, told
