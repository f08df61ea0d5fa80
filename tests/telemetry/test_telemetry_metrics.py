"""The Prometheus endpoint, logs, and that off is off."""

import json
import logging
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from schemas.errors import SetupError
from services import config, telemetry


def settings(**api: Any) -> config.Settings:
    return config.Settings(api=msgspec.structs.replace(config.Api(), **api))


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    telemetry.shutdown()


def lines(page: bytes) -> list[str]:
    return page.decode("utf-8").splitlines()


def test_the_endpoint_tells_what_was_counted() -> None:
    telemetry.configure("prefill", "prefill-1", settings())
    telemetry.ttft_s.record(0.3)
    telemetry.jobs.add(code="ok")
    telemetry.jobs.add(2, code="cancelled")
    telemetry.prefix_tokens_asked.add(128)
    telemetry.prefix_tokens_hit.add(64)
    telemetry.queue_depth.watch(lambda: 7, stage="prefill", lane="batch")
    telemetry.queue_depth.watch(lambda: 9, stage="prefill", lane="batch")
    telemetry.pages_used.watch(lambda: 3)
    with urllib.request.urlopen(telemetry.endpoint()) as answer:
        page = lines(answer.read())
    assert 'kvrelay_ttft_seconds_bucket{le="0.2"} 0.0' in page
    assert 'kvrelay_ttft_seconds_bucket{le="0.5"} 1.0' in page
    assert 'kvrelay_jobs_total{code="ok"} 1.0' in page
    assert 'kvrelay_jobs_total{code="cancelled"} 2.0' in page
    assert "kvrelay_prefix_tokens_asked_total 128.0" in page
    assert "kvrelay_prefix_tokens_hit_total 64.0" in page
    assert 'kvrelay_queue_depth{lane="batch",stage="prefill"} 9.0' in page
    assert "kvrelay_pages_used 3.0" in page
    assert any(line.startswith("process_resident_memory_bytes") for line in page)


def test_configuring_twice_is_once_and_shutting_down_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    telemetry.configure("decode", "decode-1", settings())
    url = telemetry.endpoint()
    telemetry.configure("decode", "decode-2", settings())
    assert telemetry.endpoint() == url
    telemetry.shutdown()
    telemetry.shutdown()
    assert set(threading.enumerate()) <= before
    assert telemetry.endpoint() == "" and telemetry.scrape() == b""


def test_a_process_can_be_configured_again_and_starts_from_zero() -> None:
    telemetry.configure("decode", "decode-1", settings())
    telemetry.damage.add(5)
    telemetry.shutdown()
    telemetry.configure("decode", "decode-2", settings())
    telemetry.damage.add(1)
    assert "kvrelay_damage_total 1.0" in lines(telemetry.scrape())


def test_a_taken_port_is_named_and_nothing_is_left_running() -> None:
    telemetry.configure("prefill", "prefill-1", settings())
    port = int(telemetry.endpoint().split(":")[2].split("/")[0])
    telemetry.shutdown()
    with (
        pytest.raises(SetupError, match=rf"api\.metrics_port = {port} .* cannot be used"),
        socket.create_server(("127.0.0.1", port)),
    ):
        telemetry.configure("prefill", "prefill-1", settings(metrics_port=port))
    assert telemetry.endpoint() == ""


OFF = """
import sys, threading
from services import config, telemetry
telemetry.configure("decode", "decode-1", config.load(env={}, overrides={"api.metrics_port": -1}))
telemetry.itl_s.record(0.1)
telemetry.running.watch(lambda: 1)
with telemetry.span("x"):
    telemetry.job_started(tenant="default", job="a")
loaded = [name for name in sys.modules if name.startswith("opentelemetry.sdk") or name == "prometheus_client"]
print(threading.active_count(), loaded)
"""


def test_off_starts_no_thread_and_imports_no_sdk() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "1 []\n"
    assert "job_started" in done.stderr


def test_job_lines_as_json_carry_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("prefill", "prefill-1", settings(log_format="json", metrics_port=-1))
    with telemetry.span("job"):
        trace = telemetry.trace_id()
        telemetry.job_started(tenant="default", job="日本", prompt_tokens=3)
    context = telemetry.extract({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    telemetry.job_ended(tenant="default", job="b", code="ok", context=context, tokens=2)
    started, ended = map(json.loads, capsys.readouterr().err.splitlines())
    assert (started["message"], started["job"], started["trace_id"]) == ("job_started", "日本", trace)
    assert (ended["message"], ended["code"], ended["trace_id"]) == ("job_ended", "ok", "ab" * 16)
    assert (ended["role"], ended["process"], ended["level"]) == ("prefill", "prefill-1", "info")


def test_text_lines_cannot_be_broken_by_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("prefill", "prefill-1", settings(metrics_port=-1))
    telemetry.job_ended(tenant="default", job='a b="\n日', code="ok", ttft_s=0.123456)
    (line,) = capsys.readouterr().err.splitlines()
    assert 'job="a b=\\"\\n\\u65e5" code=ok ttft_s=0.1235' in line


def test_the_log_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("prefill", "prefill-1", settings(metrics_port=-1, log_level="warning"))
    telemetry.job_started(tenant="default", job="a")
    logging.getLogger("kvrelay").warning("look")
    assert "look" in capsys.readouterr().err.splitlines()[0]
