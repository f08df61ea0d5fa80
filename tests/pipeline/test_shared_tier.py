"""Blocks that travel through Valkey between workers with disks of their own, and what expires on the way."""

import threading
from pathlib import Path

import pytest

from schemas.events import Done
from services.decode.role import DecodeRole
from tests.bus.polling import until
from tests.kvstore.valkey import Valkey
from tests.pipeline.shared_valkey import JOB, Site, fresh_job, site

PROMPT_BLOCKS = 6  # five full ones and the partial last one


class Held:
    """Decode takes no job while `closed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed = False
        monkeypatch.setattr(DecodeRole, "has_budget", lambda *_: not self.closed)

    def open(self, here: Site) -> None:
        self.closed = False
        here.pipeline.decode_worker.process._changed.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


async def stored(here: Site, num_keys: int) -> None:
    client = here.valkey.client()

    async def is_so() -> bool:
        return len(list(client.scan_iter("kvrelay:kv:*"))) == num_keys

    await until(is_so)


async def test_what_decode_cannot_find_on_its_disk_is_shared_before_the_hand_off(
    broker: str, valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the far tier to follow later, decode would miss and send the job back."""
    async with site(broker, valkey, tmp_path) as here:
        monkeypatch.setattr(here.pipeline.prefill.store._backlog, "add", lambda *_: None)
        answer = await here.ask()
        assert here.pipeline.decode.store.counters.hits == PROMPT_BLOCKS
        assert isinstance(answer.end, Done)


async def test_on_one_disk_the_far_tier_follows(
    broker: str, valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-off does not wait for Valkey: the whole answer comes while no write to it gets through."""
    gate = threading.Event()
    async with site(broker, valkey, tmp_path, one_disk=True) as here:
        cold = await here.ask()
        await stored(here, PROMPT_BLOCKS + 1)  # the prompt's, and one that decode filled
        for tier in here.tiers:
            write = tier.inner.write
            monkeypatch.setattr(tier.inner, "write", lambda *a, write=write: gate.wait(30) and write(*a))
        try:
            assert (await here.ask()).essence == cold.essence
            assert here.pipeline.decode.store.counters.hits == 2 * PROMPT_BLOCKS
            await stored(here, PROMPT_BLOCKS + 1)
        finally:
            gate.set()
        await stored(here, 2 * PROMPT_BLOCKS + 2)


async def test_blocks_that_expire_between_the_stages_are_computed_again(
    broker: str, valkey: Valkey, tmp_path: Path, held: Held
) -> None:
    """CASES 10: the decode queue is held until the blocks are gone."""
    async with site(broker, valkey, tmp_path, ttl_s=0.5, partial_ttl_s=0.5) as here:
        cold = await here.ask()
        held.closed = True
        job = await here.pipeline.submit(**fresh_job())
        await stored(here, 0)
        held.open(here)
        answer = await here.pipeline.read(job)
        assert answer.essence == cold.essence and isinstance(answer.end, Done)


async def test_a_claim_prolongs_the_blocks_lives(broker: str, valkey: Valkey, tmp_path: Path, held: Held) -> None:
    """CASES 10: what is nearly over when a job is claimed lives on from then."""
    async with site(broker, valkey, tmp_path, ttl_s=1000.0, partial_ttl_s=1000.0) as here:
        held.closed = True
        job = await here.pipeline.submit(**fresh_job())
        await stored(here, PROMPT_BLOCKS)
        client = valkey.client()
        keys = list(client.scan_iter("kvrelay:kv:*"))
        for key in keys:
            assert client.pexpire(key, 20_000)
        held.open(here)
        await here.pipeline.read(job)

        async def prolonged() -> bool:
            return all(client.pttl(key) > 900_000 for key in keys)

        await until(prolonged)


async def test_expiry_does_not_touch_a_running_generation(broker: str, valkey: Valkey, tmp_path: Path) -> None:
    """CASES 10: once decode holds its copy, the store may lose everything."""
    async with site(broker, valkey, tmp_path, store_generated="never") as here:
        long = JOB | {"max_tokens": 200}
        cold = await here.pipeline.ask(**long)
        job = await here.pipeline.submit(**long, cache_salt="flushed")
        batch = here.pipeline.decode_worker.role.batch

        async def generating() -> bool:
            return any(sequence.index > 10 for sequence in batch._sequences)

        await until(generating)
        valkey.client().flushall()
        answer = await here.pipeline.read(job)
        assert len(answer.token_ids()) == 200 and answer.essence == cold.essence


async def test_another_prefill_worker_finds_the_prompt(broker: str, valkey: Valkey, tmp_path: Path) -> None:
    """A worker with an empty disk takes the prefix from Valkey, and keeps it on its own disk from then on."""
    async with site(broker, valkey, tmp_path / "first") as here:
        cold = await here.pipeline.ask(**JOB)
    async with site(broker, valkey, tmp_path / "second") as here:
        warm = await here.pipeline.ask(**JOB)
        assert warm.start.cached_tokens == 85 and warm.essence == cold.essence
        store = here.pipeline.prefill.store

        async def promoted() -> bool:
            return store.counters.copied >= PROMPT_BLOCKS

        await until(promoted)
        assert store.tiers[0].present([ref.name for ref in _refs(here)]) == PROMPT_BLOCKS


def _refs(here: Site) -> list:
    return here.pipeline.prefill.blocks.refs("default", "", JOB["prompt_token_ids"])
