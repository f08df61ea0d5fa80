"""`/` as a browser gets it: one file, a policy that names what may run, and nothing from elsewhere."""

import base64
import hashlib
import re
from importlib.resources import files

from tests.gateway.conftest import Pipeline


async def test_the_policy_names_the_scripts_and_styles_of_the_page(pipeline: Pipeline) -> None:
    async with pipeline.session.get(pipeline.url + "/") as response:
        html, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert response.content_type == "text/html" and response.headers["X-Content-Type-Options"] == "nosniff"
        etag = response.headers["ETag"]
    for tag in ("script", "style"):
        (part,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    async with pipeline.session.get(pipeline.url + "/", headers={"If-None-Match": etag}) as response:
        assert response.status == 304 and await response.read() == b""
    async with pipeline.session.head(pipeline.url + "/") as response:
        assert response.status == 200


def test_the_page_names_no_other_place_and_makes_no_markup_of_text() -> None:
    html = files("services.gateway.page").joinpath("index.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\son\w+=", html)
