"""`kvrelay bench gateway` on a small scale: every answer reaches its reader, on both servers."""

from pathlib import Path

from services.bench.gateway import Asked, run
from services.settings import Compute, Kv, Settings
from tests.gateway.test_gateway_process import folder

__all__ = ["folder"]


def test_rounds_of_both_servers(folder: Path, tmp_path: Path) -> None:
    settings = Settings(compute=Compute(model=str(folder)), kv=Kv(data_dir=str(tmp_path / "data")))
    *rounds, medians = run(settings, Asked(num_streams=12, num_tokens=20, step_s=0.02, rounds=1))
    assert [row["server"] for row in rounds] == ["gateway", "stalled", "starlette"]
    assert all(row["num_lost"] == 0 and row["cpu_us"] > 0 for row in rounds)
    assert medians["cpu_ratio"] > 0 and medians["lost_beside_stalled"] == 0
