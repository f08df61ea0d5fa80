"""`GET /`: one page that shows the pipeline and talks to it. Script and style are in it, and nothing else may run.

The policy names them by their hashes, lets the page talk to its own origin only, and makes the browser refuse any
way to turn text into markup: what a model says is text, whatever it says.
"""

import base64
import hashlib
import re
from importlib.resources import files

from aiohttp import web


class StartPage:
    def __init__(self) -> None:
        self._body = files("services.gateway.page").joinpath("index.html").read_bytes()
        self._headers = {
            "Content-Security-Policy": _policy(self._body.decode("utf-8")),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(self._body).hexdigest()[:32]}"',
        }

    async def show(self, request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == self._headers["ETag"]:
            return web.Response(status=304, headers=self._headers)
        return web.Response(body=self._body, content_type="text/html", charset="utf-8", headers=self._headers)


def _policy(html: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hashes(html: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in found)
