"""A store that is gone, frozen, slow, full or locked costs its budget once, and the tokens are those of a cold run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.events import Done
from services.engine import blocks as blocks_module
from services.engine.blocks import FetchBudget
from tests.bus.polling import until
from tests.kvstore.conftest import read_only, small_disk  # noqa: F401 (fixtures)
from tests.kvstore.valkey import Valkey
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import run_pipeline, settings_for
from tests.pipeline.shared_valkey import BUDGET_S, JOB, TIMEOUT_S, Site, site
from tests.pipeline.tiny import tiny_files, tiny_models, tiny_pipeline_text

PASSWORD = "right-password"


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.guarded.PROBE_INTERVAL_S", 0.1)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[FetchBudget]:
    """Every budget that jobs are given from now on."""
    given: list[FetchBudget] = []
    real = blocks_module.Blocks.fetch_budget

    def fetch_budget(self: blocks_module.Blocks, num_tokens: int | None = None) -> FetchBudget:
        given.append(real(self))  # the whole budget: what computing the tiny model would cost is less than a hiccup
        return given[-1]

    monkeypatch.setattr(blocks_module.Blocks, "fetch_budget", fetch_budget)
    return given


def kill(site: Site) -> None:
    site.valkey.kill()


def freeze(site: Site) -> None:
    site.valkey.freeze()


def slow_down(site: Site) -> None:
    site.proxy.delay_s = 3.0


def fill(site: Site) -> None:
    site.valkey.client().config_set("maxmemory", 1)


def restart(site: Site) -> None:
    site.valkey.start()


def thaw(site: Site) -> None:
    site.valkey.thaw()


def speed_up(site: Site) -> None:
    site.proxy.delay_s = 0.0


def make_room(site: Site) -> None:
    site.valkey.client().config_set("maxmemory", 0)


OUTAGES: dict[str, tuple[Callable[[Site], None], Callable[[Site], None], str]] = {
    "killed": (kill, restart, "is out of reach"),
    "frozen": (freeze, thaw, "did not answer within 0.3 s"),
    "slow by 3 s": (slow_down, speed_up, "did not answer within 0.3 s"),
    "full": (fill, make_room, "is full: raise its maxmemory"),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_an_outage_costs_its_budget_once(
    broker: str, valkey: Valkey, tmp_path: Path, spent: list[FetchBudget], outage: str
) -> None:
    """CASES 23 and 24: killed, frozen, slow, full; between prefill and decode, which share nothing else."""
    begin, end, words = OUTAGES[outage]
    async with site(broker, valkey, tmp_path) as here:
        cold = await here.ask()
        assert here.reasons() == [] and here.pipeline.decode.store.counters.hits >= 5, "blocks went through Valkey"
        begin(here)
        spent.clear()
        for _ in range(6):
            assert (await here.ask()).essence == cold.essence
        waits = [budget for budget in spent if BUDGET_S - budget.left_s >= 0.5 * TIMEOUT_S]
        assert len(waits) <= 2, "each worker meets the outage once"
        assert all(words in reason for reason in here.reasons()) and here.reasons()
        assert sum(tier.counters.skipped_reads + tier.counters.skipped_writes for tier in here.tiers) > 0
        end(here)
        await until(lambda: _is(not here.reasons()))
        hits = here.pipeline.decode.store.counters.hits
        assert (await here.ask()).essence == cold.essence
        assert here.pipeline.decode.store.counters.hits > hits, "Valkey is used again"


async def test_a_wrong_password_is_an_outage_that_ends(broker: str, valkey: Valkey, tmp_path: Path) -> None:
    """CASES 23: wrong password, from the start."""
    valkey.client().config_set("requirepass", "another")
    async with site(broker, valkey, tmp_path, PASSWORD) as here:
        cold = await here.ask()
        assert (await here.ask()).essence == cold.essence
        assert all("does not accept the user or password" in reason for reason in here.reasons())
        assert here.reasons() and not any(PASSWORD in reason for reason in here.reasons())
        valkey.client(password="another").config_set("requirepass", PASSWORD)
        await until(lambda: _is(not here.reasons()))
        assert (await here.ask()).essence == cold.essence
        assert here.pipeline.decode.store.counters.hits >= 5


async def test_valkey_that_is_away_at_the_start_is_used_once_it_comes(
    broker: str, valkey: Valkey, tmp_path: Path
) -> None:
    """CASES 23: stopped before the start."""
    valkey.kill()
    async with site(broker, valkey, tmp_path) as here:
        cold = await here.ask()
        assert here.reasons()
        valkey.start()
        await until(lambda: _is(not here.reasons()))
        assert (await here.ask()).essence == cold.essence
        assert here.pipeline.decode.store.counters.hits >= 5


async def test_a_folder_that_is_read_only_for_a_while(
    tiny_pipelines: Pipelines,
    tmp_path: Path,
    read_only: Callable[[Path, bool], None],  # noqa: F811
) -> None:
    """CASES 23: the NVMe folder. What is there is still read, the rest computed; later it is written to again."""
    async with tiny_pipelines() as pipeline:
        cold = await pipeline.ask(**JOB)
        read_only(tmp_path / "kv", True)
        for number in range(3):
            answer = await pipeline.ask(**JOB, cache_salt=f"read-only-{number}")
            assert answer.essence == cold.essence and isinstance(answer.end, Done)
        beat = pipeline.prefill_worker.process.beat()
        assert beat.state == "degraded" and "Read-only file system" in beat.reasons[0]
        assert (await pipeline.ask(**JOB)).start.cached_tokens == 85, "what is stored can be read"
        assert pipeline.prefill.store.tiers[0].counters.skipped_writes > 0
        read_only(tmp_path / "kv", False)
        await until(lambda: _is(not pipeline.prefill.store.troubles))
        assert (await pipeline.ask(**JOB, cache_salt="read-only-0")).essence == cold.essence
        assert (await pipeline.ask(**JOB, cache_salt="read-only-0")).start.cached_tokens == 85


async def test_a_disk_that_is_full(broker: str, small_disk: Path) -> None:  # noqa: F811
    """CASES 24: no room on the disk, and nothing of ours to evict. It is written to again once there is."""
    ballast = small_disk / "ballast"
    settings = settings_for(small_disk, kv={"block_tokens": 16, "codec": "none"})
    models = tiny_models()[:2]
    async with run_pipeline(broker, tiny_files(), tiny_pipeline_text(), models, (settings, settings)) as pipeline:  # type: ignore[arg-type]
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        answers = [await pipeline.ask(**JOB, cache_salt=f"full-{number}") for number in range(3)]
        assert all(isinstance(answer.end, Done) for answer in answers)
        assert all(answer.essence == answers[0].essence for answer in answers)
        beat = pipeline.prefill_worker.process.beat()
        assert beat.state == "degraded" and "No space left on device" in beat.reasons[0]
        ballast.unlink()
        await until(lambda: _is(not pipeline.prefill.store.troubles))
        await pipeline.ask(**JOB, cache_salt="full-0")
        warm = await pipeline.ask(**JOB, cache_salt="full-0")
        assert warm.start.cached_tokens == 85 and warm.essence == answers[0].essence


async def test_valkey_that_evicts_costs_only_time(broker: str, valkey: Valkey, tmp_path: Path) -> None:
    """CASES 24: allkeys-lru with room for a few blocks. Blocks vanish between the stages; nothing is degraded."""
    client = valkey.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    async with site(broker, valkey, tmp_path) as here:
        cold = await here.ask()
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + 20_000)
        for _ in range(6):
            assert (await here.ask()).essence == cold.essence
        assert here.reasons() == [] and client.info("stats")["evicted_keys"] > 0


async def _is(value: bool) -> bool:
    return value
