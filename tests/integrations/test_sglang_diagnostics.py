"""``flashlatte doctor`` for SGLang, with fake sources of empty functions."""

import dataclasses
import importlib.metadata
import importlib.util
import sys

import pytest

from flashlatte.integrations.sglang import diagnostics, hooks
from flashlatte.layers import IndexerConfig, MLAConfig

V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A folder with every hooked function and SGLang's package metadata."""
    classes = ("DSATopKBackend", "DeepseekSparseAttnBackend")
    for hook in hooks.HOOKS:
        package, *modules, name = hook.target.split(".")
        if package == "sglang":
            *folders, file = [module for module in modules if module not in classes]
            path = tmp_path.joinpath("sglang", *folders, f"{file}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as source:
                source.write(f"def {name}(): ...\n")
    (tmp_path / "sglang" / "__init__.py").write_text("raise AssertionError('SGLang was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23" if name == "sglang" else real(name))
    points = importlib.metadata.EntryPoints(
        [importlib.metadata.EntryPoint("flashlatte", "flashlatte.integrations.sglang:register", diagnostics.GROUP)]
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points.select(group=group))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    return tmp_path / "sglang"


def test_report_without_missing_parts(installed):
    facts = diagnostics.diagnose(V3)
    assert facts["missing"] == []
    assert diagnostics.report(facts) == [
        "SGLang 0.5.23: FlashLatte's plugin is registered",
        "    with --attention-backend flashmla FlashLatte runs decode and SGLang runs prefill; without it SGLang "
        "chooses FlashAttention on Hopper",
    ]
    assert "SGLang runs caches of V4.1" in diagnostics.report(diagnostics.diagnose(v4=True))[1]
    sinks = dataclasses.replace(V3, indexer=IndexerConfig(), attn_sink=True)
    assert "attention sinks with its DSA backend flashmla_sparse" in diagnostics.report(diagnostics.diagnose(sinks))[1]


def test_functions_missing_in_sglang_are_named(installed):
    (installed / "srt/layers/attention/dsa_backend.py").write_text("def another(): ...\n")
    lines = diagnostics.report(diagnostics.diagnose())
    assert lines[1:] == [
        "    it lacks sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
        f".{name}, which FlashLatte does not replace"
        for name in ("_forward_fa3", "_forward_flashmla_sparse")
    ]


def test_an_excluded_plugin_is_reported(installed, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert diagnostics.report(diagnostics.diagnose(V3)) == [
        "SGLang 0.5.23: FlashLatte's plugin is not registered: SGLANG_PLUGINS is 'another', without flashlatte"
    ]


def test_no_report_without_sglang(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert diagnostics.report(diagnostics.diagnose(V3)) == []


def test_every_hook_has_a_place_in_the_installed_sglang():
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sgl_kernel") is None:
        pytest.skip("SGLang is not installed")
    assert hooks.missing_targets(diagnostics._in_sources) == []
