"""The page at a gateway that really wants API keys: it asks for one, says what is wrong with it, and goes on."""

import asyncio
from pathlib import Path

import pytest

from services.gateway import key_file
from tests.chaos.proxy import BrokerProxy
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import saying
from tests.page.browser import Page
from tests.page.test_chat import ANSWERS, LAST_TOLD, TEXTS, answered, ask, stepwise

pytestmark = pytest.mark.timeout(240)  # the first test may have to fetch a browser

ASKS = "!document.getElementById('door').hidden"
SAYS = "document.getElementById('door-text').textContent"
FOCUS = "document.activeElement.id"


async def give(page: Page, key: str) -> None:
    """With the keyboard."""
    await page.until(f"{ASKS} && {FOCUS} === 'key'")
    await page.evaluate("document.getElementById('key').select()")
    await page.type(key)
    await page.press("Enter")


async def locked(make_pipeline: MakePipeline, page: Page, folder: Path) -> tuple[Pipeline, str]:
    """A pipeline that wants a key, that key, and the page there."""
    file = folder / "keys.json"
    key = key_file.add(file, "acme")
    pipeline = await make_pipeline(keys_file=str(file))
    await page.go(pipeline.url + "/")
    return pipeline, key


async def test_it_asks_for_a_key_and_keeps_it_for_the_tab(
    make_pipeline: MakePipeline, page: Page, tmp_path: Path
) -> None:
    _, key = await locked(make_pipeline, page, tmp_path)
    await page.until(f"{ASKS} && {FOCUS} === 'key'")
    assert await page.evaluate(SAYS) == "This gateway asks for an API key."
    assert await page.evaluate("document.getElementById('state-text').textContent") == "an API key is needed"
    for wrong, words in (
        ("ключ", "no API key: it has"),
        ("a b", "no API key: it has"),
        (key + "x", "key is not right"),
    ):
        await give(page, wrong)
        await page.until(f"{SAYS}.includes({words!r})")
    await give(page, f" {key} ")
    await page.until(f"{FOCUS} === 'prompt' && document.getElementById('state-text').textContent === 'ready'")
    assert await page.evaluate("document.getElementById('door').hidden && !document.getElementById('key').value")
    await ask(page, "hi")
    await answered(page, "Hello 世界 👋")
    await page.reload()
    await ask(page, "more")
    await page.until(f"{LAST_TOLD}?.includes('from the store') && {ANSWERS}.length === 2")
    assert await page.evaluate("document.getElementById('door').hidden")
    assert (
        await page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href") == "{}" + page.requests[0]
    )
    assert [url for url in page.requests if key in url] == []
    await page.evaluate("document.getElementById('forget').click()")
    await page.until(ASKS)
    assert not await page.evaluate(f"Object.values(sessionStorage).join().includes({key!r})")
    assert [text for text in page.complaints if "401" not in text] == []


async def test_a_question_waits_for_a_key_and_is_asked_once(
    make_pipeline: MakePipeline, page: Page, tmp_path: Path
) -> None:
    pipeline, key = await locked(make_pipeline, page, tmp_path)
    await page.until(ASKS)
    await page.evaluate("document.getElementById('prompt').focus()")
    await ask(page, "never mind")
    await page.until(f"{LAST_TOLD} === 'Waiting for an API key…'")
    await page.press("Escape")
    await page.until(f"{LAST_TOLD} === 'Stopped.'")
    await ask(page, "hi")
    await page.until(f"{LAST_TOLD} === 'Waiting for an API key…'")
    await page.evaluate("document.getElementById('key').focus()")
    await give(page, "wrong")
    await page.until(f"{SAYS}.includes('not right')")
    await give(page, key)
    await answered(page, "Hello 世界 👋", 1)
    assert pipeline.worker.taken.qsize() == 1


async def test_a_key_that_is_revoked_in_the_middle_of_an_answer(
    make_pipeline: MakePipeline, page: Page, tmp_path: Path
) -> None:
    """The answer goes on under another key of the tenant."""
    file = tmp_path / "keys.json"
    first, second = (key_file.add(file, "acme") for _ in range(2))
    pipeline = await make_pipeline(keys_file=str(file))
    steps = asyncio.Semaphore(0)
    pipeline.worker.script = stepwise(steps)
    port = int(pipeline.url.rsplit(":", 1)[1])
    async with BrokerProxy(lambda: port).running() as proxy:
        await page.go(proxy.url.replace("nats:", "http:") + "/")
        await give(page, first)
        await page.until(f"{FOCUS} === 'prompt'")
        await ask(page, "hi")
        for _ in range(5):
            steps.release()
        await page.until(f"{ANSWERS}[0]?.textContent === 'Hello 世界'")
        key_file.revoke(file, str(key_file.id_of(first)))
        for link in list(proxy.links):
            link.cut()
        await page.until(f"{ASKS} && {SAYS}.includes('revoked')")
        for _ in TEXTS:
            steps.release()
        await give(page, second)
        await answered(page, "".join(TEXTS))
        pipeline.worker.script = saying("Again")
        await ask(page, "more")
        await page.until(f"{ANSWERS}[1]?.textContent === 'Again'")
    assert pipeline.worker.taken.qsize() == 2
