"""A real Chromium, driven over its DevTools protocol: only what the page's tests need."""

import asyncio
import base64
import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.page.chromium import environment

WAIT_S = 30.0
MAX_MESSAGE_BYTES = 64_000_000
# No sandbox: tests may run as root, and visit our own page only. Nothing but loopback can be reached.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
_WATCHED = ("Network", "Page", "Runtime", "Log")
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_SHIFT = 8


@contextlib.contextmanager
def running(chromium: Path, data_dir: Path) -> Iterator[str]:
    """The browser's WebSocket URL."""
    command = [str(chromium), *FLAGS, f"--user-data-dir={data_dir}", "about:blank"]
    env = environment(chromium)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", env=env)
    assert process.stderr is not None
    try:
        log = ""
        while "DevTools listening on " not in (line := process.stderr.readline()):
            log += line
            assert line, f"{chromium} did not start: {log}"
        draining = threading.Thread(target=process.stderr.read, daemon=True)
        draining.start()
        yield line.split(" on ", 1)[1].strip()
        process.terminate()
        draining.join(WAIT_S)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Page:
    """One tab in a context of its own, so that no test finds what another one stored.

    `requests` are the URLs that it asked for, `complaints` what went to the console as an error or a warning.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.loaded = asyncio.Event()
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}

    async def open(self) -> None:
        context = await self.call("Target.createBrowserContext")
        target = await self.call("Target.createTarget", url="about:blank", **context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in _WATCHED:
            await self.call(f"{domain}.enable")

    async def listen(self) -> None:
        """Until the socket is closed."""
        async for message in self._socket:
            found = json.loads(message.data)
            waiting = self._waiting.pop(found.get("id", 0), None)
            if waiting is None:
                self._note(found.get("method", ""), found.get("params", {}))
            elif not waiting.done():
                waiting.set_result(found)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params, **self._session})
        async with asyncio.timeout(WAIT_S):
            found = await answer
        assert "error" not in found, f"{method}: {found['error']}"
        result: dict[str, Any] = found["result"]
        return result

    async def go(self, url: str) -> None:
        self.loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self.loaded.wait(), WAIT_S)

    async def reload(self) -> None:
        self.loaded.clear()
        await self.call("Page.reload")
        await asyncio.wait_for(self.loaded.wait(), WAIT_S)

    async def evaluate(self, code: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits until the expression holds; its value."""
        look = f"const found = ({condition}); found ? done(found) : setTimeout(look, 10);"
        try:
            return await self.evaluate(f"new Promise((done) => {{ const look = () => {{ {look} }}; look(); }})")
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never: {condition}\n{shown}\n{self.complaints}") from None

    async def press(self, key: str, shift: bool = False) -> None:
        code, text = _KEYS[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **named)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def screenshot(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(f"console: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Page]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES) as socket,
    ):
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.open()
            yield page
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
