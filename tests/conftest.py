"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=2, help="how often the chaos tests kill each kind of process (make chaos: 10)"
    )
    parser.addoption("--full-chaos", action="store_true", help="the whole chaos run and soak, not the small ones")
    parser.addoption("--seed", type=int, help="of the chaos run; the same seed makes the same choices")
    parser.addoption("--jobs", type=int, help="how many jobs of the chaos run must end right")
    parser.addoption("--fault-every", type=float, help="seconds between two faults of the chaos run")
    parser.addoption("--requests", type=int, default=2000, help="how many requests the soak makes")
