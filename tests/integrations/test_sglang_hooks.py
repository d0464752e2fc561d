"""Registration with SGLang, and the signatures of the replaced functions."""

import ast
import importlib.util
import inspect
import logging
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peer_sources import MISSING, folders
from support.sglang_calls import untouched

from flashlatte import deep_gemm, flash_mla
from flashlatte.integrations import sglang
from flashlatte.integrations.sglang import attention, hooks
from flashlatte.integrations.sglang.flash_mla_module import provide_flash_mla


class Registry:
    """A fake of SGLang's hook registry."""

    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, hook_type):
        assert target not in self.hooks
        self.hooks[target] = (hook, hook_type)


HookType = Enum("HookType", ["BEFORE", "AFTER", "AROUND", "REPLACE"])


@pytest.fixture
def fake_sglang(monkeypatch):
    """Fake modules with every hooked function, without ``flash_mla``."""
    monkeypatch.setattr(sglang, "_registered", set())
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    for name in ("flash_mla.flash_mla_interface", "flash_mla.fused_norm_rope_attn_rope_cast"):
        monkeypatch.setitem(sys.modules, name, None)
    for hook in hooks.HOOKS:
        path, _, attribute = hook.target.rpartition(".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = types.ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        setattr(sys.modules[path], attribute, untouched)


def test_every_hook_is_registered_once(fake_sglang, caplog):
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    sglang.register_hooks(registry, HookType)
    assert set(registry.hooks) == {hook.target for hook in hooks.HOOKS}
    assert registry.hooks["deep_gemm.fp8_mqa_logits"] == (deep_gemm.fp8_mqa_logits, HookType.REPLACE)
    decode = "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache"
    assert registry.hooks[decode] == (attention.flash_mla_with_kvcache, HookType.AROUND)
    assert not caplog.records


def test_functions_missing_in_sglang_are_skipped_and_named(fake_sglang, monkeypatch, caplog):
    for module in ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla"):
        monkeypatch.delattr(sys.modules[module], "flash_mla_sparse_fwd")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert len(registry.hooks) == len(hooks.HOOKS) - 7
    assert [record.getMessage() for record in caplog.records] == [
        "FlashLatte: this SGLang lacks sglang.kernels.ops.attention.flash_mla_interface.flash_mla_sparse_fwd, "
        "which FlashLatte does not replace."
    ]


def test_a_deep_gemm_that_cannot_be_imported_is_skipped(fake_sglang, monkeypatch, tmp_path, caplog):
    (tmp_path / "deep_gemm.py").write_text("raise RuntimeError('no CUDA_HOME')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm")
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert set(registry.hooks) == {hook.target for hook in hooks.HOOKS if not hook.target.startswith("deep_gemm.")}
    assert not caplog.records


def test_functions_moved_since_an_earlier_sglang_are_replaced(fake_sglang, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "sglang.kernels.ops.attention.flash_mla_interface")
    monkeypatch.delitem(sys.modules, "sglang.kernels.ops.attention.dsv4.topk")
    monkeypatch.delitem(sys.modules, "sglang.srt.layers.attention.dsa.utils")
    for parent, name in (("sglang.kernels.ops", "attention"), ("sglang.srt.layers.attention.dsa", "utils")):
        monkeypatch.delattr(sys.modules[parent], name)
    registry = Registry()
    sglang.register_hooks(registry, HookType)
    assert {
        "sgl_kernel.flash_mla.flash_mla_with_kvcache",
        "sgl_kernel.flash_mla.flash_mla_sparse_fwd",
        "sglang.jit_kernel.dsv4.topk.topk_transform_512_v2",
    } <= set(registry.hooks)
    assert not caplog.records


def test_without_sglang_nothing_happens(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang.register()
    assert "nothing is registered" in caplog.text


def test_without_a_gpu_nothing_is_registered(fake_sglang, monkeypatch, caplog):
    registry: Any = types.ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry, registry.HookType = Registry(), HookType
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", types.ModuleType("sglang.srt.plugins"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.set_level(logging.INFO)
    sglang.register()
    assert not registry.HookRegistry.hooks
    assert "no NVIDIA GPU" in caplog.text


def test_a_missing_flash_mla_is_replaced(fake_sglang):
    provide_flash_mla()
    module = importlib.import_module("flash_mla")
    assert module.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert importlib.import_module("flash_mla.flash_mla_interface").FlashMLASchedMeta is flash_mla.FlashMLASchedMeta
    with pytest.raises(AttributeError, match="prefill needs the package sgl-flash-mla"):
        module.fused_norm_rope_attn_rope_cast.prefill  # noqa: B018
    with pytest.raises(AttributeError, match="flash_mla_fp8 needs the package sgl-flash-mla"):
        module.flash_mla_fp8  # noqa: B018


def test_a_flash_mla_without_sglangs_fused_attention_is_kept(fake_sglang, monkeypatch, tmp_path):
    """FlashMLA and FlashLatte's alias lack the module that SGLang's interface imports."""
    flash_mla.install_alias(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_mla", "flash_mla.flash_mla_interface", "flash_mla.fused_norm_rope_attn_rope_cast"):
        monkeypatch.delitem(sys.modules, name)
    provide_flash_mla()
    module = importlib.import_module("flash_mla")
    assert module.__file__ == str(tmp_path / "flash_mla" / "__init__.py")
    with pytest.raises(AttributeError, match="decode needs the package sgl-flash-mla"):
        module.fused_norm_rope_attn_rope_cast.decode  # noqa: B018


# DeepGEMM's own functions are compared in test_peer_signatures.
@pytest.mark.parametrize(
    "hook",
    [hook for hook in (*hooks.HOOKS, hooks.START) if hook.around or "deep_gemm" not in hook.target],
    ids=lambda hook: hook.target,
)
def test_signatures_are_sglangs(hook):
    """Compare with the sources of the installed or fetched SGLang, which need not be importable.

    An earlier one may lack our last arguments.
    """
    theirs = signature_in_sources(*hook.target.split("."))
    mine = list(inspect.signature(hook.function).parameters.values())[int(hook.around) :]
    positional = [p for p in mine if p.kind == p.POSITIONAL_OR_KEYWORD][: len(theirs.args)]
    assert [argument.arg for argument in theirs.args] == [p.name for p in positional]
    assert {argument.arg for argument in theirs.kwonlyargs} <= {p.name for p in mine if p.kind == p.KEYWORD_ONLY}
    defaults = [p.default for p in positional if p.default is not p.empty]
    assert [ast.literal_eval(default) for default in theirs.defaults] == defaults


def signature_in_sources(package: str, *modules_and_name: str) -> ast.arguments:
    *modules, name = modules_and_name
    spec = importlib.util.find_spec(package)
    found = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    found += [folder / package for name in ("sglang", "sgl-deep-gemm") for folder in folders(name)[::-1]]
    found = [folder for folder in found if folder.exists()]
    if not found:
        pytest.skip(f"{package} is not installed, and {MISSING}")
    path = Path(found[0], *modules)
    # The target may be a method, whose class is the last part; sgl-kernel defines its functions in other modules.
    paths = [path.with_suffix(".py"), path.parent.with_suffix(".py")] if modules else sorted(path.glob("*.py"))
    for functions in (ast.walk(ast.parse(path.read_text())) for path in paths if path.exists()):
        for node in functions:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node.args
    pytest.skip(f"this {package} does not have it")
