"""What must start fast, or run without a model, loads neither torch nor transformers."""

import subprocess
import sys

import pytest

from tests.architecture.source_tree import modules

HEAVY = ("torch", "transformers")
LIGHT_PARTS = ("services.bus", "services.text", "services.gateway", "services.telemetry", "services.supervisor")
LIGHT_PARTS += ("services.cli", "services.models", "schemas", "kvstore", "services.config", "services.kv")
LIGHT_PARTS += ("services.openai", "services.batch", "services.client")

LOOK = """
import sys
from importlib import import_module
for name in sys.argv[2:]:
    import_module(name)
    heavy = [library for library in sys.argv[1].split(",") if library in sys.modules]
    if heavy:
        sys.exit(f"{name} imports {heavy}")
"""


@pytest.mark.parametrize("part", LIGHT_PARTS)
def test_a_light_part_stays_light(part: str) -> None:
    names = [name for name in modules() if name == part or name.startswith(part + ".")]
    assert names
    command = [sys.executable, "-c", LOOK, ",".join(HEAVY), *names]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_help_imports_no_client_and_no_server() -> None:
    code = (
        "import sys; sys.argv = ['kvrelay', '--version']\n"
        "import services.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print([n for n in ('nats', 'aiohttp', 'tokenizers', 'opentelemetry', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "[]"
