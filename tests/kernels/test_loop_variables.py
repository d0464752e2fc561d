"""Detects code in which Triton merges two names of one value into one loop variable, which keeps its first value.

``x = y`` before a loop and ``x = y`` or ``y = x`` inside it compile, and give wrong results from the second iteration
on: Triton determines loop-carried variables by a first pass over the loop's body, in which both names have the same
value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import flashlatte

WRONG = """
def produce(count):
    entries = load(0)
    following = entries
    for step in range(count):
        if step % 32 == 0:
            entries = following
            following = load(step)
        use(entries)
"""
RIGHT = WRONG.replace("following = entries\n", "following = load(1)\n")


def test_no_loop_has_two_names_of_one_value():
    sources = {path: path.read_text() for path in Path(flashlatte.__file__).parent.rglob("*.py")}
    kernels = {path: source for path, source in sources.items() if "jit" in source or "kernel" in path.name}
    found = [f"{path}:{line}: {names}" for path, source in kernels.items() for line, names in confusions(source)]
    assert found == []
    assert len(kernels) > 50


def test_the_pattern_is_detected():
    assert [names for _, names in confusions(WRONG)] == ["entries, following"]
    assert not list(confusions(RIGHT))


def confusions(source: str) -> Iterator[tuple[int, str]]:
    """Assignments in loops to a variable from another one that had the same value before the loop."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for loop in ast.walk(function):
            if not isinstance(loop, (ast.For, ast.While)):
                continue
            within = {pair: line for line, pair in renamings(loop)}
            ahead = {frozenset(pair) for line, pair in renamings(function) if line < loop.lineno}
            for (name, value), line in within.items():
                if frozenset((name, value)) in ahead:
                    yield line, f"{name}, {value}"


def renamings(tree: ast.AST) -> Iterator[tuple[int, tuple[str, str]]]:
    """Assignments of one plain name to another, also within tuples."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            members = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                members = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in members:
                if isinstance(name, ast.Name) and isinstance(value, ast.Name):
                    yield node.lineno, (name.id, value.id)
