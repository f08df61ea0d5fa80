"""A browser for all tests of the page, a tab for each; gateway and scripted worker are those of the gateway's tests."""

import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.conftest import make_pipeline, pipeline, server
from tests.page import browser, chromium
from tests.page.browser import Page

__all__ = ["make_pipeline", "pipeline", "server"]


@pytest.fixture(scope="session")
def chromium_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        path = chromium.found() or chromium.fetch()
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        pytest.fail(
            f"no Chromium is installed and none could be fetched ({error!r}): install Chromium or Chrome, "
            "or name one in $CHROMIUM"
        )
    with browser.running(path, tmp_path_factory.mktemp("chromium")) as url:
        yield url


@pytest.fixture
async def page(chromium_url: str) -> AsyncIterator[Page]:
    async with browser.opened(chromium_url) as opened:
        yield opened
