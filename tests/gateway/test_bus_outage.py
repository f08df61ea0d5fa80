"""The broker goes away and comes back: every open request still ends, and the next ones are served."""

import asyncio
from pathlib import Path

from tests.bus.throwaway import throwaway_server
from tests.gateway.conftest import BUS, MakePipeline
from tests.gateway.scripted_worker import Work, token


async def test_an_outage(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    with throwaway_server(tmp_path, settings=BUS) as own:
        pipeline = await make_pipeline(url=own.url)

        async def script(work: Work) -> None:
            await work.say(work.start(), token(0, "before"))
            await work.lost.wait()

        default, pipeline.worker.script = pipeline.worker.script, script
        async with pipeline.post(pipeline.chat(stream=True, timeout_s=0.5)) as response:
            await response.content.readany()
            await asyncio.to_thread(own.kill)
            text = (await response.content.read()).decode()
            assert '"deadline_exceeded"' in text
            assert "[DONE]" not in text
        async with pipeline.post(pipeline.chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        async with pipeline.session.get(pipeline.url + "/ready") as response:
            assert response.status == 503
            assert (await response.json())["reasons"] == ["no connection to NATS"]
        await asyncio.to_thread(own.start)
        pipeline.worker.script = default
        await pipeline.bus.wait_connected(20.0)
        while True:
            async with pipeline.post(pipeline.chat()) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.05)
        while pipeline.gateway.exchange.jobs:  # the end that could not be written is written now
            await asyncio.sleep(0.01)


async def test_a_stream_goes_on_after_an_outage(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    with throwaway_server(tmp_path, settings=BUS) as own:
        pipeline = await make_pipeline(url=own.url)
        restarted = asyncio.Event()
        default = pipeline.worker.script

        async def script(work: Work) -> None:
            await work.say(work.start())
            await restarted.wait()
            await default(work)

        pipeline.worker.script = script
        async with pipeline.post(pipeline.chat(stream=True)) as response:
            first = await response.content.readany()
            await asyncio.to_thread(own.kill)
            await asyncio.to_thread(own.start)
            restarted.set()
            text = (first + await response.content.read()).decode()
        assert text.count('"role"') == 1
        assert "世界" in text
        assert text.endswith("data: [DONE]\n\n")
