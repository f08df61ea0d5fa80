"""The embedded broker is a child like any other."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

BROKER = """
import asyncio, sys
from services import config
from services.supervisor.broker import Broker
async def main():
    broker = Broker(config.load(env={}, overrides={"kv.data_dir": sys.argv[1]}), lambda: None)
    broker.start()
    print(broker.pid, flush=True)
    await broker.keep()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")
def test_the_broker_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", BROKER, str(tmp_path)], stdout=subprocess.PIPE, encoding="utf-8")
    assert parent.stdout is not None
    with parent.stdout:
        broker = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _, _ = select.select([broker], [], [], 30.0)
    os.close(broker)
    assert gone
