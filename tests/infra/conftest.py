"""Certificates for the whole run, and the gateway over a scripted worker as tests/gateway has it."""

import pytest

from tests.gateway.conftest import make_pipeline, pipeline, server
from tests.infra.certificates import Authority

__all__ = ["make_pipeline", "pipeline", "server"]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))
