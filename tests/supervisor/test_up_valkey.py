"""`kvrelay up --redis embedded`: real processes that share blocks through a Valkey of their own."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from services.config import embedded_redis_socket
from tests.chaos.up import Up, running_up

DEADLINE_S = 10.0
QUESTION = ("generate", "--temperature", "0", "--max-tokens", "8", "Name the capital of France.")
ANSWER = "The capital of France is Paris."


def ready(up: Up) -> dict:
    with urllib.request.urlopen(f"{up.http}/ready") as answer:
        assert answer.status == 200
        return json.load(answer)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_embedded_valkey_is_used_frozen_killed_and_ended(tmp_path: Path) -> None:
    """CASES 23 with real processes: /ready is 200 and says what is wrong, and all is well again within 10 s."""
    async with running_up(tmp_path, "--redis", "embedded") as up:
        socket = embedded_redis_socket(tmp_path)
        assert socket.stat().st_mode & 0o077 == 0, "nobody else may read prompts there"
        assert (await up.kvrelay(*QUESTION))[0].startswith(ANSWER)
        with redis.Redis(unix_socket_path=str(socket)) as client:
            until(lambda: any(True for _ in client.scan_iter("kvrelay:kv:default:*")))
        assert ready(up)["state"] == "ok"

        os.kill(up.pid("valkey"), signal.SIGSTOP)
        try:
            for _ in range(3):
                assert (await up.kvrelay(*QUESTION))[0].startswith(ANSWER)
            until(lambda: ready(up)["state"] == "degraded")
            assert any("did not answer within 0.5 s" in reason for reason in ready(up)["reasons"])
        finally:
            os.kill(up.pid("valkey"), signal.SIGCONT)
        until(lambda: ready(up)["state"] == "ok")

        dead = up.kill("valkey")
        assert (await up.kvrelay(*QUESTION))[0].startswith(ANSWER)
        await up.replaced("valkey", dead)
        until(lambda: ready(up)["state"] == "ok")
        assert (await up.kvrelay(*QUESTION))[0].startswith(ANSWER)
        pid = up.pid("valkey")
        assert await up.stop() == 0
    assert not psutil.pid_exists(pid) and not socket.exists()
