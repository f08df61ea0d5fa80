"""`kvrelay bench queue` measures behind as many waiting jobs as it says, and leaves them there."""

import json
from pathlib import Path

from schemas.subjects import Lane, Stage
from services.bench import queue
from services.bus.depth import num_waiting
from services.bus.streams import Source
from services.settings import Settings
from tests.cli.test_cli_commands import kvrelay

INTERACTIVE = Source(Stage.PREFILL, Lane.INTERACTIVE, queue.MODEL, queue.BUILD)


async def test_rates_are_taken_at_the_depth_that_was_asked_for(tmp_path: Path) -> None:
    await queue.fill(Settings(), str(tmp_path), 300)
    async with queue.opened(Settings(), str(tmp_path)) as (bus, reader):
        for _ in range(2):
            assert await queue.publish_rate(bus, 5) > 0
            assert await queue.pull_rate(reader, 5) > 0
            assert await num_waiting(bus, INTERACTIVE) == 300


def test_it_prints_a_line_for_each_depth_beside_the_first(tmp_path: Path) -> None:
    done = kvrelay("bench", "queue", "--queued", "3,20,40", "--jobs", "2", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["queued"], row["beside"]) for row in rows] == [(20, 3), (40, 3)]
    assert all(row["publish_ratio"] > 0 and row["pull_ratio"] > 0 for row in rows)
