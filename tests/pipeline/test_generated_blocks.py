"""Which of the blocks that decode makes are stored: `kv.store_generated`."""

import pytest

from schemas.events import Done
from tests.pipeline.conftest import Pipelines

CHAT = {"messages": [{"role": "user", "content": "a question that fills a block or two"}]}
RAW = {"prompt": "a text that fills a block or two"}


@pytest.mark.parametrize(
    ("mode", "chats", "others"), [("always", True, True), ("conversation", True, False), ("never", False, False)]
)
async def test_store_generated(tiny_pipelines: Pipelines, mode: str, chats: bool, others: bool):
    async with tiny_pipelines(kv={"store_generated": mode}) as pipeline:
        counters = pipeline.decode.store.counters  # prefill writes the prompt's blocks through a store of its own
        for job, stored in ((RAW, others), (CHAT, chats)):
            before = counters.writes
            answer = await pipeline.ask(**job, max_tokens=64, temperature=0, ignore_eos=True)
            assert isinstance(answer.end, Done)
            assert (counters.writes - before >= 3) == stored, job
