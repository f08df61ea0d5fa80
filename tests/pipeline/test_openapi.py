"""Schemathesis against a gateway with workers: no server error, and no status that the document does not name."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.gateway.gateway import Gateway
from services.gateway.operations import OPERATIONS
from services.settings import Api, Settings
from tests.pipeline.local import run_pipeline, settings_for
from tests.pipeline.tiny import SLUG, tiny_files, tiny_models, tiny_pipeline_text

CONTEXT_TOKENS = 64  # no answer takes long

# A 504 is what a request gets whose own `timeout_s` is over, and they try 1e-10 s.
CONFIG = """\
hooks = "tests.pipeline.schemathesis_hooks"
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,allow_header_conformance,unsupported_method"
)


@contextlib.asynccontextmanager
async def served(broker: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a gateway whose worker is the tiny model with a small context."""
    files = msgspec.structs.replace(tiny_files(), context_tokens=CONTEXT_TOKENS)
    text = msgspec.structs.replace(tiny_pipeline_text(), context_tokens=CONTEXT_TOKENS)
    settings = settings_for(folder, kv={"block_tokens": 16})
    models = tiny_models()[:2]
    async with run_pipeline(broker, files, text, models, (settings, settings)) as pipeline:
        gateway = Gateway(Settings(api=Api(port=0)), pipeline.bus, "gateway-test", {SLUG: text})
        await gateway.start()
        try:
            await gateway.readiness.check(SLUG, 10.0)
            yield gateway.url
        finally:
            await gateway.close()


async def schemathesis(url: str, folder: Path, *options: str) -> str:
    """What it printed; fails if it found anything."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG, encoding="utf-8")
    command = [str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(config)]
    command += ["run", f"{url}/openapi.json", "--checks", CHECKS, "--seed", "1", *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNDEFAULTENCODING"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed = (await process.communicate())[0].decode()
    if process.returncode:
        pytest.fail(printed, pytrace=False)
    return printed


async def test_a_short_look(broker: str, tmp_path: Path) -> None:
    async with served(broker, tmp_path) as url:
        printed = await schemathesis(url, tmp_path, "--phases", "fuzzing", "--max-examples", "5")
    assert f"Tested: {len(OPERATIONS) - 1}" in printed, "all but the document itself"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_long_look(broker: str, tmp_path: Path) -> None:
    """Every phase: what each schema's edges give, random requests, and answers that lead to further requests."""
    async with served(broker, tmp_path) as url:
        await schemathesis(url, tmp_path, "--max-examples", "60")
