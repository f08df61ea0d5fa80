"""Entry point of a decode worker."""

from services.decode.role import DecodeRole
from services.settings import Settings
from services.worker.entry import run_worker


def run(settings: Settings, bus_url: str, *, rolling: bool = False) -> int:
    """Runs a decode worker until SIGTERM; the exit code. Raises `SetupError` if it cannot start."""
    return run_worker(settings, bus_url, "decode", DecodeRole, rolling=rolling)
