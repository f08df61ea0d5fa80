"""Our modules and what they import, read from their source without running them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "kernels", "kvstore", "services")


class Import(NamedTuple):
    """`importer` imports `imported`; `line` is in the importer. Imports under TYPE_CHECKING are left out."""

    importer: str
    imported: str
    line: int


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@cache
def imports() -> list[Import]:
    return [
        Import(name, imported, node.lineno)
        for name, tree in modules().items()
        for node in _running(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for imported in _imported(node)
    ]


def calls() -> Iterator[tuple[str, ast.Call]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield name, node


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _running(child)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """`from a.b import c` is `a.b.c` if that is a module of ours, else `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in modules() else base
