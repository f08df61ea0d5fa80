"""`kvrelay demo`, as `make demo` runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.default_model import default_model


@pytest.mark.timeout(240)  # 15 s on a machine that does nothing else
def test_the_demo_answers_over_both_doors_and_hits_the_store(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(default_model().path.parent)
    command = [sys.executable, "-P", "-m", "services.cli.main", "demo", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "\nThe capital of France is Paris.\n" in done.stdout
    cached = [int(count) for count in re.findall(r"\((\d+) cached\)", done.stdout)]
    assert len(cached) == 3
    assert cached[2] >= 128
    assert "Traceback" not in done.stderr
