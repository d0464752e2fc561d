"""Code outside of ``kv_cache`` uses the properties of formats, not their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flashlatte.kv_cache.index_formats import INDEX_FORMATS
from flashlatte.kv_cache.registry import FORMATS
from flashlatte.kv_cache.turboquant import TURBOQUANT_NAMES

ROOT = Path(__file__).parents[2] / "flashlatte"
# bf16, fp16, fp32 and fp8 are words for dtypes too.
NAMES = {name for name, layout in (FORMATS | INDEX_FORMATS).items() if not layout.plain}
NAMES |= set(TURBOQUANT_NAMES)
# Packages that take format names from users, or show them: as options, or cases of a benchmark or test.
USERS = ("bench", "cli.py", "demo", "doctor", "integrations", "testing")
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in (*USERS, "kv_cache") and path.relative_to(ROOT).parts[-1] != "__init__.py"
]


def named_formats(source: str) -> Iterator[tuple[int, str]]:
    """Strings that are a format's name, except default values of arguments."""
    tree = ast.parse(source)
    arguments = [node.args for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    defaults = {id(value) for args in arguments for value in (*args.defaults, *args.kw_defaults)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in defaults:
            yield node.lineno, node.value


def test_code_does_not_depend_on_format_names():
    found = {str(path.relative_to(ROOT)): list(named_formats(path.read_text())) for path in FILES}
    assert not {path: names for path, names in found.items() if names}


def test_finds_names():
    assert list(named_formats('def f(x="model1"):\n    return x.name == "v32"')) == [(2, "v32")]
