"""The page in a real Chromium: a chat that streams, goes on after every kind of loss, stops, and stays text."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.gateway.gateway import Gateway
from services.settings import Settings
from tests.chaos.proxy import BrokerProxy
from tests.gateway.conftest import API, BUS, MakePipeline, Pipeline
from tests.gateway.scripted_worker import Script, Work, ending, saying, token
from tests.gateway.tiny_model import tiny_text
from tests.page.browser import Page

pytestmark = pytest.mark.timeout(240)  # the first test may have to fetch a browser

ANSWERS = "document.querySelectorAll('.assistant .said')"
LAST_TOLD = "Array.from(document.querySelectorAll('.told')).at(-1)?.textContent"
FOCUSED = """(() => {
  const focused = document.activeElement;
  const name = focused === document.body ? "body" : focused.id || focused.textContent;
  return [name, getComputedStyle(focused).outlineStyle];
})()"""
TEXTS = ["Hel", "", "lo", " 世", "界", "", " 👋", "!", " and", " so", " on"] * 2
HOSTILE = (
    "</div></article></script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>* { display: none !important }</style><iframe src='javascript:alert(1)'></iframe>"
    "&lt;b&gt; {{7*7}} \u202egnihtyna \u0000 \u2028 " + "Z\u0351\u036b\u0343" * 50 + "x" * 3000
)


async def ask(page: Page, text: str) -> None:
    """With the keyboard: the message field has the focus from the start."""
    await page.type(text)
    await page.press("Enter")


async def answered(page: Page, text: str, number: int = 0) -> None:
    await page.until(f"{LAST_TOLD}?.includes('from the store')")
    assert await page.evaluate(f"{ANSWERS}[{number}].textContent") == text


def stepwise(steps: asyncio.Semaphore) -> Script:
    """Says `TEXTS`, each when the test allows it."""

    async def script(work: Work) -> None:
        await work.say(work.start())
        for index, text in enumerate(TEXTS):
            await steps.acquire()
            await work.say(token(index, text))
        await work.say(*ending(work.job, len(TEXTS)))

    return script


async def test_an_answer_streams_and_nothing_outside_is_asked(pipeline: Pipeline, page: Page) -> None:
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    await page.go(pipeline.url + "/")
    await ask(page, "hi")
    for _ in range(5):
        steps.release()
    await page.until(f"{ANSWERS}[0]?.textContent === 'Hello 世界'")
    assert await page.evaluate("document.querySelector('.assistant').ariaBusy") == "true"
    for _ in TEXTS:
        steps.release()
    await answered(page, "".join(TEXTS))
    assert await page.evaluate("document.activeElement.id") == "prompt"
    pipeline.worker.script = saying("Again")
    await ask(page, "more")
    await page.until(f"{ANSWERS}[1]?.textContent === 'Again'")
    first, second = [(await pipeline.worker.taken.get()).job for _ in range(2)]
    assert first.max_tokens == 512 and first.owner is None
    assert len(second.prompt_token_ids or []) > len(first.prompt_token_ids or [])  # the conversation so far
    assert page.complaints == []
    assert {url for url in page.requests if not url.startswith((pipeline.url + "/", "data:"))} == set()


async def test_a_cut_connection_is_resumed(make_pipeline: MakePipeline, page: Page) -> None:
    pipeline = await make_pipeline(resume_grace_s=0.0)
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    port = int(pipeline.url.rsplit(":", 1)[1])
    rng = random.Random(5)
    async with BrokerProxy(lambda: port).running() as proxy:
        await page.go(proxy.url.replace("nats:", "http:") + "/")
        await ask(page, "hi")
        cuts = set(rng.sample(range(1, len(TEXTS)), 3))
        for index in range(len(TEXTS)):
            if index in cuts:
                said = "".join(TEXTS[:index])
                await page.until(f"{ANSWERS}[0]?.textContent === {said!r}")
                for link in list(proxy.links):
                    link.cut()
            steps.release()
        await answered(page, "".join(TEXTS))
    assert [text for text in page.complaints if not text.startswith("network: ")] == []
    assert sum("/events" in url for url in page.requests) >= 4


async def test_reload_in_the_middle(pipeline: Pipeline, page: Page) -> None:
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    await page.go(pipeline.url + "/")
    await ask(page, "hi")
    for _ in range(8):
        steps.release()
    await page.until(f"{ANSWERS}[0]?.textContent.endsWith('!')")
    await page.reload()
    for _ in TEXTS:
        steps.release()
    await answered(page, "".join(TEXTS))
    await page.reload()
    assert await page.evaluate(f"{ANSWERS}[0].textContent") == "".join(TEXTS)
    assert await page.evaluate("document.querySelector('.user .said').textContent") == "hi"
    assert pipeline.worker.taken.qsize() == 1 and page.complaints == []


@contextlib.asynccontextmanager
async def next_gateway(server: NatsServer, slug: str, port: int = 0) -> AsyncIterator[Gateway]:
    async with await Bus.connect(server.url, f"next-{slug}-{port}", BUS) as bus:
        settings = Settings(api=API, bus=BUS)
        gateway = Gateway(settings, bus, bus.name, {slug: tiny_text(slug)})
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.close()


async def test_the_gateway_restarts(pipeline: Pipeline, server: NatsServer, page: Page) -> None:
    """Once in the middle of an answer, and once before a question, which then waits in the page."""
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    ports = [int(pipeline.url.rsplit(":", 1)[1])]
    async with BrokerProxy(lambda: ports[0]).running() as proxy:
        await page.go(proxy.url.replace("nats:", "http:") + "/")
        await ask(page, "hi")
        for _ in range(5):
            steps.release()
        await page.until(f"{ANSWERS}[0]?.textContent === 'Hello 世界'")
        await pipeline.gateway.close()
        for link in list(proxy.links):
            link.cut()
        await page.until(f"{LAST_TOLD}?.includes('Connection lost')")
        for _ in TEXTS:
            steps.release()
        async with next_gateway(server, pipeline.model) as gateway:
            ports[0] = int(gateway.url.rsplit(":", 1)[1])
            await answered(page, "".join(TEXTS))
        for link in list(proxy.links):
            link.cut()
        pipeline.worker.script = saying("Once")
        await ask(page, "more")
        await page.until(f"{LAST_TOLD}?.includes('Connection lost')")
        async with next_gateway(server, pipeline.model) as gateway:
            ports[0] = int(gateway.url.rsplit(":", 1)[1])
            await page.until(f"{ANSWERS}[1]?.textContent === 'Once'")
            await page.until("document.getElementById('stop').hidden")
    assert pipeline.worker.taken.qsize() == 2
    assert [text for text in page.complaints if not text.startswith("network: ")] == []


async def test_the_keyboard_alone(pipeline: Pipeline, page: Page) -> None:
    """Breaks a line, sends, stops, opens the options: everything can be reached, shows its focus and has a name."""
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    await page.go(pipeline.url + "/")
    await page.type("one")
    await page.press("Enter", shift=True)
    await ask(page, "two")
    steps.release()
    await page.until(f"{ANSWERS}[0]?.textContent === 'Hel'")
    assert await page.evaluate("document.querySelector('.user .said').textContent") == "one\ntwo"
    await page.press("Escape")
    await page.until(f"{LAST_TOLD} === 'Stopped.'")
    assert await asyncio.wait_for(pipeline.worker.cancelled.get(), 10.0) == (await pipeline.worker.taken.get()).job.id
    reached: list[str] = []
    for _ in range(30):
        await page.press("Tab")
        name, outline = await page.evaluate(FOCUSED)
        assert outline != "none" or name in ("prompt", "body"), name  # the field's box shows its focus
        reached.append(name)
        if name == "options-button" and await page.evaluate("document.getElementById('options').hidden"):
            await page.press("Enter")
            await page.until("!document.getElementById('options').hidden")
    assert {"prompt", "options-button", "temperature", "max-tokens", "system", "pipeline-button", "new"} <= set(reached)
    found = await page.call("Accessibility.getFullAXTree")
    roles = ("button", "textbox", "spinbutton", "combobox", "progressbar", "region", "complementary")
    nodes = [node for node in found["nodes"] if node.get("role", {}).get("value") in roles and not node["ignored"]]
    assert len(nodes) > 8
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
    assert page.complaints == []


async def test_hostile_text_stays_text(pipeline: Pipeline, page: Page) -> None:
    """From the model and from the user, now and after a reload."""
    pipeline.worker.script = saying(HOSTILE[:70], HOSTILE[70:])
    await page.look(380, 700)
    await page.go(pipeline.url + "/")
    await ask(page, "<script>document.title = 'owned'</script>")
    await answered(page, HOSTILE)
    await page.reload()
    await page.until(f"{ANSWERS}[0]?.textContent.length > 100")
    assert await page.evaluate(f"{ANSWERS}[0].textContent") == HOSTILE
    assert await page.evaluate("document.title") == "kvrelay"
    assert await page.evaluate("document.querySelectorAll('.turn :is(script, img, style, iframe)').length") == 0
    assert await page.evaluate("document.documentElement.scrollWidth") == 380
    assert await page.evaluate(
        "document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth"
    )
    refused = "(() => { try { document.body.innerHTML = '<b>'; return false } catch (e) { return true } })()"
    assert await page.evaluate(refused)
    assert [text for text in page.complaints if "TrustedHTML" not in text and "trusted" not in text.lower()] == []


async def test_a_refusal_is_told_and_can_be_tried_again(pipeline: Pipeline, page: Page) -> None:
    await page.go(pipeline.url + "/")
    await ask(page, "long " * 100)  # over the tiny model's context
    await page.until("document.querySelector('.told.failed')")
    assert "context" in await page.evaluate(LAST_TOLD)
    await page.evaluate("document.querySelector('.told button').click()")
    await page.until("document.querySelectorAll('.turn').length === 2 && document.querySelector('.told.failed')")
    await page.evaluate("document.getElementById('new').click()")
    await ask(page, "hi")
    await answered(page, "Hello 世界 👋")


async def test_with_a_key_the_stream_is_read_without_an_event_source(make_pipeline: MakePipeline, page: Page) -> None:
    """An EventSource sends no headers: with a key in the options the page reads the stream itself."""
    pipeline = await make_pipeline()
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    port = int(pipeline.url.rsplit(":", 1)[1])
    async with BrokerProxy(lambda: port).running() as proxy:
        await page.go(proxy.url.replace("nats:", "http:") + "/")
        await page.evaluate("useKey('secret')")
        await page.evaluate("EventSource = undefined")
        await ask(page, "hi")
        for _ in range(5):
            steps.release()
        await page.until(f"{ANSWERS}[0]?.textContent === 'Hello 世界'")
        for link in list(proxy.links):
            link.cut()
        for _ in TEXTS:
            steps.release()
        await answered(page, "".join(TEXTS))
