"""`tests/CASES.md` names tests that there are, for each of its numbers; and tests speak of numbers that it has."""

import ast
import re
from functools import cache

import pytest

from tests.architecture.source_tree import ROOT

CASES = ROOT / "tests" / "CASES.md"
NUMBERS = range(1, 41)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
MENTION = re.compile(r"\bCASES ((?:\d+|, | and )+)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def entries() -> dict[int, list[tuple[str, str]]]:
    """The tests of each number, as (file, function)."""
    _, *parts = re.split(r"^### (\d+)$", CASES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {int(number): REFERENCE.findall(text) for number, text in zip(parts[::2], parts[1::2], strict=True)}
    assert len(found) == len(parts) // 2, "a number is there twice"
    return found


@cache
def functions(file: str) -> frozenset[str]:
    """Names of its tests: those that pytest collects, of a contract too, whose class is collected elsewhere."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"), file)
    classes = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    nodes = [node for body in (tree.body, *classes) for node in body]
    return frozenset(n.name for n in nodes if isinstance(n, Function) and n.name.startswith("test_"))


def mentioned(text: str) -> list[int]:
    return [int(number) for found in MENTION.findall(text) for number in re.findall(r"\d+", found)]


def test_every_number_is_there_in_order() -> None:
    assert list(entries()) == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_its_tests_are_there(number: int) -> None:
    named = entries()[number]
    assert named and len(named) == len(set(named))
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []


def test_every_reference_belongs_to_a_number() -> None:
    """And whatever looks like one has the form that is checked."""
    text = CASES.read_text(encoding="utf-8")
    num_named = sum(map(len, entries().values()))
    assert len(REFERENCE.findall(text)) == text.count("::") == num_named


def test_what_is_renamed_is_missed() -> None:
    file, name = entries()[1][0]
    assert name in functions(file)
    assert f"{name}_renamed" not in functions(file) and not functions("tests/gone.py")


def test_mentions_are_read() -> None:
    assert mentioned("CASES 7 and 8: 9 of 10; (CASES 12, 31, 32). CASES 9. 3 more") == [7, 8, 12, 31, 32, 9]


def test_tests_mention_numbers_that_there_are() -> None:
    strange, num_found = [], 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (doc := ast.get_docstring(node)):
                numbers = mentioned(doc)
                num_found += len(numbers)
                name = getattr(node, "name", "")
                strange += [f"{path.relative_to(ROOT)}::{name}: {n}" for n in numbers if n not in entries()]
    assert strange == [] and num_found > 50
