"""The embedded Valkey: a socket of one's own, the same place after a crash, a clear word when it cannot start."""

from pathlib import Path

import pytest
import redis

from schemas.errors import SetupError
from services.config import Kv, embedded_redis_socket, redis_url
from services.supervisor.valkey import ValkeyServer


def answers(server: ValkeyServer) -> bool:
    with redis.Redis.from_url(server.url) as client:
        return bool(client.ping())


def test_it_comes_back_in_the_same_place_and_ends(tmp_path: Path) -> None:
    settings = Kv(data_dir=str(tmp_path), redis_url="embedded", redis_max_bytes=20_000_000)
    server = ValkeyServer(settings)
    server.start()
    try:
        assert server.url == redis_url(settings)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping() and client.config_get("maxmemory*")["maxmemory"] == "20000000"
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert embedded_redis_socket(tmp_path).stat().st_mode & 0o077 == 0
        server.kill()
        assert not server.alive() and server.wait() == -9
        server.start()
        assert answers(server)
    finally:
        server.stop()
    assert not embedded_redis_socket(tmp_path).exists() and server.pid is None


def test_a_long_path_gets_a_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100)
    server = ValkeyServer(Kv(data_dir=str(folder)))
    server.start()
    try:
        assert len(str(embedded_redis_socket(folder))) < 100
        assert answers(server)
    finally:
        server.stop()
        embedded_redis_socket(folder).parent.rmdir()


def test_it_says_why_it_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "redis").write_bytes(b"a file where its folder should be")
    with pytest.raises(SetupError, match="Valkey cannot listen on"):
        ValkeyServer(Kv(data_dir=str(tmp_path))).start()


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValkeyServer, "_options", lambda _: ["--no-such-option", "1"])
    with pytest.raises(SetupError, match="did not become ready"):
        ValkeyServer(Kv(data_dir=str(tmp_path))).start()
