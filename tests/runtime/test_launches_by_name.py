"""A launch names its arguments: of twenty in a row one is easily taken for its neighbour, and nothing would say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "flashlatte"
# ``some_kernel[(programs,)](…)``, ``KERNELS[ctas][(rows,)](…)``
LAUNCHED = re.compile(r"kernel\w*(\[\w+\])?\[\(", re.IGNORECASE)
PATHS = [path for path in sorted(ROOT.rglob("*.py")) if LAUNCHED.search(path.read_text())]
MOST_WITHOUT_NAMES = 2


def launches(path: Path) -> list[ast.Call]:
    """Calls like ``some_kernel[grid](...)``."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Subscript) and "kernel" in ast.unparse(call.func.value).lower()
    ]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_have_names(path: Path) -> None:
    for call in launches(path):
        nameless = [argument for argument in call.args if not ast.unparse(argument).startswith("*by_name(")]
        assert len(nameless) <= MOST_WITHOUT_NAMES, f"{path}:{call.lineno} passes {len(nameless)} without a name"


def test_launches_are_found() -> None:
    assert sum(len(launches(path)) for path in PATHS) >= len(PATHS) > 20
