"""A launch passes records first and all other arguments by name: adjacent arguments of one type are easily swapped."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "flashlatte"
# ``some_kernel[(programs,)](…)``, ``KERNELS[ctas][(rows,)](…)``
LAUNCHED = re.compile(r"kernel\w*(\[\w+\])?\[\(", re.IGNORECASE)
PATHS = [path for path in sorted(ROOT.rglob("*.py")) if LAUNCHED.search(path.read_text())]
MAX_WITHOUT_NAMES = 2


def launches(path: Path) -> list[ast.Call]:
    """Calls like ``some_kernel[grid](...)``."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Subscript) and "kernel" in ast.unparse(call.func.value).lower()
    ]


def num_records(path: Path, kernel: ast.expr) -> int:
    """The records of a kernel of a module, which are positional; 0 if the launch is of a local variable."""
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    name = ast.unparse(kernel)
    return len(getattr(vars(module).get(name), "records", ()))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_have_names(path: Path) -> None:
    for call in launches(path):
        assert isinstance(call.func, ast.Subscript)
        others = len(call.args) - num_records(path, call.func.value)
        assert others <= MAX_WITHOUT_NAMES, f"{path}:{call.lineno} passes {others} without a name"


def test_launches_are_found() -> None:
    assert sum(len(launches(path)) for path in PATHS) >= len(PATHS) > 20
