"""Entry point of a prefill worker."""

from services.prefill.role import PrefillRole
from services.settings import Settings
from services.worker.entry import run_worker


def run(settings: Settings, bus_url: str, *, rolling: bool = False) -> int:
    """Runs a prefill worker until SIGTERM; the exit code. Raises `SetupError` if it cannot start."""
    return run_worker(settings, bus_url, "prefill", PrefillRole, rolling=rolling)
