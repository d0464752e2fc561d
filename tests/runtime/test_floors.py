"""The layers of the library: a package imports only from lower layers."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "flashlatte"
# From the lowest floor to the highest. A package imports from lower floors, or from itself.
FLOORS = (
    ("runtime",),
    ("split_kv", "kernels", "kv_cache"),
    ("ops",),
    ("flash_mla", "flash_attn_varlen", "deep_gemm", "flashinfer"),
    ("layers",),
    ("distributed",),
    ("engine",),
    ("testing",),
    ("bench",),
    ("integrations", "doctor", "precompile", "serve"),
    ("demo",),
    ("cli", "__main__"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
_NAME = re.compile(r"flashlatte(?:\.\w+)+")


def _module(name: str) -> str | None:
    """The longest prefix of a dotted name that is a module."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name if name not in ("", "flashlatte") else None


def _docstrings(tree: ast.AST) -> set[ast.AST]:
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Modules of the library that a module names: in imports anywhere in the file, and in strings that are import
    targets."""
    tree = _tree(module)
    prose = _docstrings(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            names = _NAME.findall(node.value)
        found |= {other for name in names if name.startswith("flashlatte") and (other := _module(name))}
    return frozenset(found - {module})


def _room(module: str) -> str:
    return module.split(".")[1]


LIBRARY = sorted(name for name in MODULES if name != "flashlatte")


def test_every_room_has_a_floor():
    assert {_room(module) for module in LIBRARY} <= set(FLOOR)


def test_a_room_imports_from_lower_floors_or_itself():
    upward = [
        f"{module} imports {other}"
        for module in LIBRARY
        for other in imports(module)
        if _room(other) != _room(module) and FLOOR[_room(other)] > FLOOR[_room(module)]
    ]
    assert not upward


# Operations that run the kernels of others: several in a row, or as their forward pass.
COMPOSED = {"index_select": {"index_logits", "topk"}, "sparse_attention": {"sparse_prefill"}}


def test_operations_do_not_import_each_other():
    found = []
    for module in (name for name in LIBRARY if name.startswith("flashlatte.ops.")):
        operation = module.split(".")[2]
        others = {other.split(".")[2] for other in imports(module) if other.startswith("flashlatte.ops.")}
        found += [f"{module} imports {other}" for other in others - {operation} - COMPOSED.get(operation, set())]
    assert not found


def test_no_cycle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' → '.join((*path[path.index(module) :], module))}"
        if module in done:
            return
        for other in imports(module):
            if not other.startswith(module + ".") and not module.startswith(other + "."):
                visit(other, (*path, module))
        done.add(module)

    for module in LIBRARY:
        visit(module, ())


@functools.cache
def _imported(module: str, *, everywhere: bool) -> list[str]:
    """The modules of the library that a module imports, in order: when it is imported, or everywhere in the file."""
    nodes = list(ast.walk(_tree(module))) if everywhere else _tree(module).body
    found = []
    for node in sorted(
        (one for one in nodes if isinstance(one, (ast.Import, ast.ImportFrom))), key=lambda one: one.lineno
    ):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        else:
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name in MODULES]


def _loaded_with(package: str) -> set[str]:
    """The modules of a package that its ``__init__`` imports, directly or through others."""
    found, pending = set[str](), [package]
    while pending:
        new = set(_imported(pending.pop(), everywhere=False)) - found
        found |= new
        pending += new
    return {name for name in found if name.startswith(package + ".")}


def test_a_package_is_imported_before_the_modules_that_it_imports():
    """Of two threads, one that imports a package, and one that imports such a module of it first, each would hold the
    lock that the other needs; Python then raises in one of them. Commands have one thread."""
    wrong = []
    for package in (name for name, path in MODULES.items() if path.name == "__init__.py" and name != "flashlatte"):
        inside = set() if _room(package) in ("bench", "demo", "doctor") else _loaded_with(package)
        for module in (name for name in LIBRARY if inside and not f"{name}.".startswith(f"{package}.")):
            every = _imported(module, everywhere=True)
            first = next((name for name in every if name == package or name in inside), package)
            if first != package:
                wrong.append(f"{module} imports {first} before {package}")
    assert not wrong


def test_no_two_classes_share_a_name():
    """So that a search for a class finds one."""
    modules: dict[str, list[str]] = {}
    for module in sorted(MODULES):
        for node in _tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module)
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
