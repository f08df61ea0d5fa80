"""Who may import whom: the table of DESIGN section 3, part by part."""

import ast
import graphlib
from collections import defaultdict

import pytest

from tests.architecture.source_tree import PACKAGES, imports, modules

BASE = {"schemas", "services.settings", "services.tuned", "services.config", "services.telemetry"}
WORKER = BASE | {"kernels", "kvstore", "services.bus", "services.text", "services.models", "services.engine"}

MAY_IMPORT: dict[str, set[str]] = {
    "schemas": set(),
    "kernels": set(),
    "kvstore": {"schemas", "kernels"},
    "services": set(),
    "services.settings": {"schemas"},
    "services.tuned": {"schemas", "services.settings"},
    "services.config": {"schemas", "services.settings", "services.tuned"},
    "services.telemetry": {"schemas", "services.settings", "services.config"},
    # One layer of two parts: what a model is on disk, and what its tokenizer makes of text.
    "services.models": BASE | {"services.text", "kernels"},
    "services.text": BASE | {"services.models"},
    "services.bus": BASE,
    "services.engine": BASE | {"kernels", "kvstore", "services.bus", "services.text", "services.models"},
    # The store for its operator: without a model or a queue.
    "services.kv": BASE | {"kvstore", "services.text", "services.models"},
    "services.worker": WORKER,
    "services.prefill": WORKER | {"services.worker"},
    "services.decode": WORKER | {"services.worker"},
    "services.both": WORKER | {"services.worker", "services.prefill", "services.decode"},
    "services.openai": BASE | {"services.text"},
    "services.client": {"schemas", "services.settings", "services.bus"},
    "services.batch": BASE | {"services.bus", "services.text", "services.openai"},
    "services.gateway": BASE
    | {"services.bus", "services.text", "services.models", "services.openai", "services.batch"},
    "services.supervisor": BASE | {"services.bus"},
    "services.bench": WORKER | {"services.worker", "services.batch"},
    "services.cli": BASE
    | {"services.bus", "services.text", "services.models", "services.supervisor", "services.kv"}
    | {
        "services.prefill",
        "services.decode",
        "services.both",
        "services.gateway",
        "services.bench",
        "services.openai",
        "services.batch",
    },
}


def part(module: str) -> str:
    """`services.bus.queue` -> `services.bus`, `kvstore.blob` -> `kvstore`."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "services" else names[0]


def test_every_part_has_its_place_in_the_table() -> None:
    assert {part(module) for module in modules()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below_it(name: str) -> None:
    allowed = MAY_IMPORT[name] | {name}
    wrong = [
        f"{i.importer}:{i.line} imports {i.imported}"
        for i in imports()
        if part(i.importer) == name and i.imported.split(".")[0] in PACKAGES and part(i.imported) not in allowed
    ]
    assert wrong == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for found in imports():
        if found.imported in modules() and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_imports_are_absolute() -> None:
    relative = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []
