"""The process as it is run: light, ready, and gone with exit code 0 after a SIGTERM."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from schemas.subjects import model_slug
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.server import NatsServer
from tests.gateway.conftest import BUS
from tests.gateway.scripted_worker import ScriptedWorker, Work, ending, token
from tests.gateway.tiny_model import CONTEXT_TOKENS, EOS, TEMPLATE, tokenizer_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of a model without weights: the gateway needs none."""
    made = tmp_path / "Tiny.Chat"
    made.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 259,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": EOS,
    }
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (made / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    (made / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return made


class Process:
    """`kvrelay gateway` on a free port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""
        self.log = ""

    async def listening(self) -> str:
        assert self.process.stderr is not None
        while not (found := re.search(r"listening .*?url=\"?(http://[\w.:]+)", self.log)):
            line = await self.process.stderr.readline()
            assert line, self.log
            self.log += line.decode()
        return found.group(1)

    async def exit_code(self) -> int:
        assert self.process.stderr is not None
        self.log += (await self.process.stderr.read()).decode()
        return await self.process.wait()

    def loaded(self, library: str) -> bool:
        return library in Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")


@pytest.fixture
async def process(server: NatsServer, folder: Path, tmp_path: Path) -> AsyncIterator[Process]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "OTEL_"))}
    env = {
        **others,
        "KVRELAY_API_PORT": "0",
        "KVRELAY_BUS_URL": server.url,
        "KVRELAY_KV_DATA_DIR": str(tmp_path / "data"),
        "KVRELAY_COMPUTE_MODEL": str(folder),
        "KVRELAY_SCHEDULER_GRACE_S": "20",
        "LC_ALL": "C",
        "PYTHONWARNINGS": "error::EncodingWarning",
    }
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "warn_default_encoding", "-m", "services.cli.main", "gateway",
        env=env, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    found = Process(started)
    yield found
    if started.returncode is None:
        started.kill()
    await found.exit_code()
    started._transport.close()  # type: ignore[attr-defined]  # 3.11 leaves it to the collector, which warns


async def test_from_start_to_sigterm(server: NatsServer, process: Process, folder: Path) -> None:
    url = await process.listening()
    assert not process.loaded("libtorch")
    slug = model_slug(folder.name)
    async with await Bus.connect(server.url, "test", BUS) as bus, aiohttp.ClientSession() as session:
        beats = BeatTable(bus)
        await beats.start()
        worker = ScriptedWorker(bus, slug)
        released = asyncio.Event()

        async def script(work: Work) -> None:
            await work.say(work.start(), token(0, "世"))
            await released.wait()
            await work.say(token(1, "界"), *ending(work.job, 2))

        worker.script = script
        await worker.start()
        while True:
            async with session.get(url + "/ready") as response:
                if response.status == 200:
                    break
        body = {"model": slug, "messages": [{"role": "user", "content": "你好"}], "stream": True}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            first = (await response.content.readany()).decode()
            process.process.send_signal(signal.SIGTERM)
            assert await beats.wait_for(lambda table: any(b.state == "draining" for b in table.alive("gateway")), 10.0)
            released.set()
            text = first + (await response.content.read()).decode()
        assert "世" in text and "界" in text
        assert text.endswith("data: [DONE]\n\n")
        assert await process.exit_code() == 0
        assert await beats.wait_for(lambda table: not table.alive("gateway"), 10.0)
        await worker.close()
        await beats.close()
    assert "你好" not in process.log
    assert re.search(r"request .*path=/v1/chat/completions", process.log)
