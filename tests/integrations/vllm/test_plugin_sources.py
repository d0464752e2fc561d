"""The plugin's imports and overrides, compared with the vLLM sources that ``.ci/peers.py`` fetches.

A method of vLLM's that takes a new argument, or a class that moved, fails a test here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.peer_sources import MISSING, folders

from flashlatte.integrations.vllm import compat

PLUGIN = Path(__file__).parents[3] / "flashlatte" / "integrations" / "vllm"
# Not imported with vLLM 0.20: models with an indexer, V4 and the CPU platform need 0.32, prefill backends 0.22.
LATER = {
    *(
        "cpu.py",
        "fused_rows.py",
        "indexer.py",
        "indexer_metadata.py",
        "models.py",
        "models_v4.py",
        "prefill.py",
        "sparse.py",
    ),
    *("sparse_host.py", "v4.py", "v4_indexer.py"),
}
# Imported if vLLM has it.
OPTIONAL = {"vllm.v1.attention.backends.mla.prefill.registry"}

pytestmark = pytest.mark.skipif(not folders("vllm"), reason=MISSING)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module_file(source: Path, module: str) -> Path | None:
    path = source.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """(module, name) pairs that a module imports from vLLM."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


@functools.cache
def names(file: Path) -> frozenset[str]:
    """Names that a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def plugin_files() -> list[Path]:
    return sorted(PLUGIN.rglob("*.py"))


@pytest.mark.parametrize("source", folders("vllm"), ids=lambda source: source.name)
def test_imported_names_exist(source: Path) -> None:
    oldest = source.name.startswith("vllm-0.20")
    missing = []
    for file in plugin_files():
        if oldest and file.name in LATER and file.parent.name == "backends":
            continue
        for module, name in imported(parsed(file)).values():
            if oldest and module in OPTIONAL:
                continue
            place = module_file(source, module)
            lazily = place is not None and "__getattr__" in names(place)
            if place is None or not (name in names(place) or lazily or module_file(source, f"{module}.{name}")):
                missing.append(f"{file.name}: {module}.{name}")
    assert missing == []


def class_of(source: Path, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The definition of one of vLLM's classes and its module, following imports."""
    file = module_file(source, module)
    if file is None:
        return None
    for node in parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    other = imported(parsed(file)).get(name)
    return class_of(source, *other) if other is not None else None


def methods_of(source: Path, module: str, name: str) -> dict[str, ast.arguments]:
    """Methods of one of vLLM's classes, including inherited ones."""
    found = class_of(source, module, name)
    if found is None:
        return {}
    module, node = found
    methods: dict[str, ast.arguments] = {}
    for base in reversed(node.bases):
        methods |= methods_of(source, module, base_name(base))
    return methods | {item.name: item.args for item in node.body if isinstance(item, ast.FunctionDef)}


def base_name(base: ast.expr) -> str:
    while isinstance(base, (ast.Subscript, ast.Attribute)):
        base = base.value if isinstance(base, ast.Subscript) else ast.Name(base.attr)
    return base.id if isinstance(base, ast.Name) else ""


def overrides(source: Path) -> Iterator[tuple[str, ast.arguments, ast.arguments]]:
    """Methods of the plugin's classes that override vLLM's: name, vLLM's arguments and ours."""
    oldest = source.name.startswith("vllm-0.20")
    for file in plugin_files():
        if oldest and file.name in LATER:
            continue
        from_vllm = imported(parsed(file))
        for node in parsed(file).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in map(base_name, node.bases):
                theirs = methods_of(source, *from_vllm[base]) if base in from_vllm else {}
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name in theirs:
                        yield f"{node.name}.{item.name}", theirs[item.name], item.args


def refused(theirs: ast.arguments, ours: ast.arguments, *, in_order: bool) -> list[str]:
    """Arguments of vLLM's method that ours does not accept by name or, with ``in_order``, at the same position."""
    positional = [argument.arg for argument in (*ours.posonlyargs, *ours.args)]
    named = {argument.arg for argument in (*ours.args, *ours.kwonlyargs)}
    wrong = []
    for position, argument in enumerate(theirs.args):
        name = argument.arg
        if name in named:
            moved = in_order and name in positional and positional.index(name) != position
        else:
            moved = not (
                ours.kwarg or position < len(ours.posonlyargs) or (ours.vararg and position >= len(positional))
            )
        wrong += [name] if moved else []
    return wrong + [one.arg for one in theirs.kwonlyargs if one.arg not in named and ours.kwarg is None]


@pytest.mark.parametrize("source", folders("vllm"), ids=lambda source: source.name)
def test_overridden_methods_take_vllms_arguments(source: Path) -> None:
    found = list(overrides(source))
    assert len(found) > 10
    # vLLM constructs attention with keywords: the order of its constructors' arguments differs.
    wrong = {name: refused(theirs, ours, in_order="__init__" not in name) for name, theirs, ours in found}
    assert {name: arguments for name, arguments in wrong.items() if arguments} == {}


def calls(tree: ast.Module, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name]


@pytest.mark.parametrize("name", ["fused_norm_rope", "fused_q"])
def test_functions_of_the_indexers_layer_take_vllms_arguments(name: str) -> None:
    layer = folders("vllm")[-1] / "vllm" / "models" / "deepseek_v32" / "attention.py"
    (call,) = calls(parsed(layer), name)
    (ours,) = (
        node.args
        for node in parsed(PLUGIN / "backends" / "fused_rows.py").body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert len(call.args) == len(ours.args)
    given, taken = {one.arg for one in call.keywords}, {one.arg for one in ours.kwonlyargs}
    assert taken <= given
    assert given == taken or ours.kwarg is not None


def test_a_new_argument_is_found() -> None:
    def arguments(text: str) -> ast.arguments:
        (node,) = ast.parse(f"def f({text}): pass").body
        assert isinstance(node, ast.FunctionDef)
        return node.args

    theirs = arguments("self, a, b, *, c")
    assert refused(theirs, arguments("self, a, b, c"), in_order=True) == []
    assert refused(theirs, arguments("self, a"), in_order=True) == ["b", "c"]
    assert refused(theirs, arguments("self, b, a, **rest"), in_order=True) == ["a", "b"]
    assert refused(theirs, arguments("self, x, y, /, **rest"), in_order=True) == []


# vLLM's MLA backends that ``auto`` does not replace: for other hardware, for models with their own attention or
# with an indexer, and TRITON_MLA, the fallback for what FlashLatte refuses.
OTHER_BACKENDS = {
    *("AMX_MLA", "CPU_MLA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_TRITON_MLA", "XPU_MLA_SPARSE"),
    *("FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4"),
    *("FLASHINFER_MLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE_DSV41", "ROCM_FLASHMLA_SPARSE_DSV41"),
    *("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120", "FLASHMLA_SPARSE"),
    *("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4", "TRITON_MLA"),
}


def test_vllms_mla_backends_are_known() -> None:
    registry = folders("vllm")[-1] / "vllm" / "v1" / "attention" / "backends" / "registry.py"
    (backends,) = (
        node for node in parsed(registry).body if isinstance(node, ast.ClassDef) and node.name == "AttentionBackendEnum"
    )
    members = {
        target.id
        for node in backends.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {name for name in members if "MLA" in name} == {*compat.AUTOMATIC_DENSE, *OTHER_BACKENDS}
