"""Entry point of a worker that does both stages."""

from services.both.role import BothRole
from services.settings import Settings
from services.worker.entry import run_worker


def run(settings: Settings, bus_url: str, *, rolling: bool = False) -> int:
    """Runs the worker until SIGTERM; the exit code. Raises `SetupError` if it cannot start."""
    return run_worker(settings, bus_url, "both", BothRole, rolling=rolling)
