"""`/v1/stats`: what it knows, how old that is, and what it does while the broker is away."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.beat import Beat
from schemas.meter import Meter, bucket_of
from services.bus.beats import BeatPublisher, BeatTable
from services.gateway import stats as stats_module
from services.gateway.meters import Meters
from tests.bus.throwaway import throwaway_server
from tests.gateway.conftest import BUS, MakePipeline, Pipeline
from tests.gateway.scripted_worker import BUILD


async def stats(pipeline: Pipeline, until: Callable[[Any], bool] = lambda _: True) -> Any:
    """The first answer that `until` holds for."""
    async with asyncio.timeout(20.0):
        while True:
            async with pipeline.session.get(pipeline.url + "/v1/stats") as response:
                assert response.status == 200
                found = await response.json()
            if until(found):
                return found
            await asyncio.sleep(0.05)


async def test_queues_and_workers(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=False)
    for _ in range(3):
        headers = {"Prefer": "respond-async"}
        url = pipeline.url + "/v1/chat/completions"
        async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
            assert response.status == 202
    found = await stats(pipeline, lambda found: any(lane["waiting"] for lane in found["queues"]["lanes"]))
    lanes = {(lane["stage"], lane["lane"], lane["build"]): lane for lane in found["queues"]["lanes"]}
    begun = {(stage, lane, BUILD) for stage in ("rework", "decode") for lane in ("interactive", "batch")}
    assert set(lanes) == {("prefill", "interactive", ""), ("prefill", "batch", "")} | begun
    assert (lanes["prefill", "interactive", ""]["waiting"], lanes["prefill", "interactive", ""]["taken"]) == (3, 0)
    assert 0.0 <= found["queues"]["age_s"] < 5.0 and found["queues"]["dead_letters"] == 0
    assert [worker["role"] for worker in found["workers"]] == ["prefill", "decode"]
    assert all(worker["state"] == "ok" and 0.0 <= worker["age_s"] < 5.0 for worker in found["workers"])
    assert found["gateway"]["models"] == [pipeline.model] and found["connected"]
    assert found["work"]["ttft"] == {"count": 0, "p50_ms": None, "p90_ms": None, "p99_ms": None}


async def test_a_silent_worker_is_told_and_a_stopped_one_is_not(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(stats_module, "SILENT_AFTER_S", -1.0)
        found = await stats(pipeline)
        assert [worker["state"] for worker in found["workers"]] == ["silent", "silent"]
        assert found["work"]["age_s"] is None
    await pipeline.worker.close()
    assert (await stats(pipeline, lambda found: not found["workers"]))["gateway"]["state"] == "warming"


async def test_what_workers_counted_lately(pipeline: Pipeline) -> None:
    """Of one that was at it before the gateway listened only what came since."""
    meter = Meter(generated_tokens=1000, itl={bucket_of(9.0): 1000})

    def beat() -> Beat:
        name = f"decode-{pipeline.model}-2"
        return Beat(process=name, role="decode", state="ok", model=pipeline.model, build=BUILD, meter=meter)

    publisher = BeatPublisher(pipeline.bus, beat)
    await publisher.start()
    try:
        await stats(pipeline, lambda found: len(found["workers"]) == 3)
        pipeline.gateway.stats.meters.mark()
        table = BeatTable(pipeline.bus)
        await table.start()
        await publisher.beat()
        assert await table.wait_for(lambda table: table.get(beat().process) is not None, 10.0)
        meters = Meters(table)
        assert meters.grown(60.0) == (Meter(), 0.0)
        meters.mark()
        grown = Meter(asked_tokens=200, hit_tokens=150, generated_tokens=100, ttft={bucket_of(0.2): 1})
        meter = meter.plus(grown).plus(Meter(itl={bucket_of(0.010): 90, bucket_of(0.040): 10}))
        await publisher.beat()
        assert await table.wait_for(lambda table: table.get(beat().process) == beat(), 10.0)
        meters.mark()
        lately, _ = meters.grown(60.0)
        assert lately == grown.plus(Meter(itl={bucket_of(0.010): 90, bucket_of(0.040): 10}))
        await table.close()
        found = await stats(pipeline, lambda found: found["work"]["itl"]["count"])
        work = found["work"]
        assert work["itl"]["p50_ms"] == pytest.approx(10.0, rel=0.05)
        assert work["itl"]["p99_ms"] == pytest.approx(40.0, rel=0.05)
        assert (work["prefix_asked_tokens"], work["prefix_hit_tokens"], work["ttft"]["count"]) == (200, 150, 1)
        assert work["generated_tokens_per_s"] > 0.0
    finally:
        await publisher.close()


async def test_the_broker_is_away(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """What was known is told, older and older."""
    with throwaway_server(tmp_path, settings=BUS) as own:
        pipeline = await make_pipeline(url=own.url)
        before = await stats(pipeline)
        await asyncio.to_thread(own.kill)
        found = await stats(pipeline, lambda found: not found["connected"] and found["queues"]["age_s"] > 1.0)
        assert found["queues"]["lanes"] == before["queues"]["lanes"] != []
        assert found["gateway"]["reasons"] == ["no connection to NATS"]
        await asyncio.to_thread(own.start)
        await pipeline.bus.wait_connected(20.0)
        await stats(pipeline, lambda found: found["connected"] and found["queues"]["age_s"] < 1.0)
