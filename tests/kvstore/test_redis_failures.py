"""What is said of a server that cannot be used; never its password."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.redis.tier import RedisTier, key_of
from kvstore.tier import BlobName, Life
from schemas.errors import KvRefused, KvUnavailable, SetupError
from tests.kvstore.valkey import Valkey, cluster, free_port, running

NAME = BlobName("default", bytes(32))
SECRET = "hunter2-hunter2"
OTHER_SECRET = "correct-horse"
LIFE = Life(0, time.time() + 1000)


def failure(tier: RedisTier, *, write: bool = False) -> KvUnavailable:
    try:
        with pytest.raises(KvUnavailable) as failed:
            if write:
                tier.write(NAME, [memoryview(b"x" * 1000)], LIFE)
            else:
                tier.read(NAME, [memoryview(bytearray(10_000))])
        return failed.value
    finally:
        tier.close()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Valkey]:
    with running(tmp_path / "locked", "--requirepass", SECRET) as server:
        yield server


@pytest.mark.parametrize("login", ["", f":{OTHER_SECRET}@", f"nobody:{OTHER_SECRET}@"])
def test_a_wrong_password_is_named_and_not_shown(locked: Valkey, login: str, caplog: pytest.LogCaptureFixture) -> None:
    """CASES 23: wrong password."""
    caplog.set_level(logging.DEBUG)
    error = failure(RedisTier(f"redis://{login}127.0.0.1:{locked.port}"))
    assert "does not accept the user or password of kv.redis_url" in error.message
    assert f"127.0.0.1:{locked.port}" in error.message
    for text in (error.message, repr(error.__cause__), caplog.text):
        assert OTHER_SECRET not in text and SECRET not in text


def test_the_right_password_works(locked: Valkey) -> None:
    tier = RedisTier(f"redis://:{SECRET}@127.0.0.1:{locked.port}/0", timeout_s=10.0)
    tier.write(NAME, [memoryview(b"x" * 1000)], LIFE)
    assert tier.present([NAME]) == 1
    tier.close()


def test_nobody_listens() -> None:
    error = failure(RedisTier(f"redis://:{SECRET}@127.0.0.1:{free_port()}"))
    assert "is out of reach" in error.message and SECRET not in error.message
    assert "is out of reach" in failure(RedisTier("unix:///nowhere/socket")).message


def test_a_full_server_refuses_writes_and_is_read(tmp_path: Path) -> None:
    """CASES 24: maxmemory with noeviction."""
    with running(tmp_path / "full") as server:
        tier = RedisTier(server.url, timeout_s=10.0)
        tier.write(NAME, [memoryview(b"x" * 1000)], LIFE)
        server.client().config_set("maxmemory", 1)
        with pytest.raises(KvRefused, match="is full: raise its maxmemory"):
            tier.write(NAME, [memoryview(b"y" * 1000)], LIFE)
        with pytest.raises(KvRefused):
            tier.probe()
        assert tier.present([NAME]) == 1
        assert tier.read(NAME, [memoryview(bytearray(10_000))]) == 1000
        tier.quarantine(NAME)
        assert tier.present([NAME]) == 0, "what is damaged goes even when there is no room to keep it"
        server.client().config_set("maxmemory", 0)
        tier.probe()
        tier.close()


def test_a_frozen_server_times_out(valkey: Valkey) -> None:
    """CASES 23: it takes connections and never answers."""
    tier = RedisTier(valkey.url, timeout_s=0.1)
    valkey.freeze()
    try:
        assert "did not answer within 0.1 s" in failure(tier).message
    finally:
        valkey.thaw()


def test_one_node_of_a_cluster_says_what_is_missing(tmp_path: Path) -> None:
    with cluster(tmp_path, num_primaries=2) as nodes:
        slot = nodes[0].client().cluster("KEYSLOT", key_of(NAME).decode())
        other = nodes[0 if slot >= 8192 else 1]
        error = failure(RedisTier(other.url, timeout_s=10.0), write=True)
        assert "set kv.redis_cluster = true" in error.message


def test_whoever_is_no_redis_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        tier = RedisTier(f"redis://127.0.0.1:{server.getsockname()[1]}", timeout_s=10.0)

        def answer() -> None:
            client, _ = server.accept()
            client.recv(100)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert "a reply that begins with b'H'" in failure(tier).message
        thread.join()


@pytest.mark.parametrize("url", ["redis://:pw@host:port", "nonsense", "redis://:pw@host:6379/0?socket_timeout=x"])
def test_a_url_that_cannot_be_read_stops_the_start(url: str) -> None:
    for is_cluster in (False, True):
        with pytest.raises(SetupError, match=r"kv\.redis_url") as failed:
            RedisTier(url, is_cluster=is_cluster).close()
        assert "pw" not in failed.value.message
