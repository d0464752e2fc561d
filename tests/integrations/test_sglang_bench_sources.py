"""Calls of ``flashlatte bench sglang-steps`` compared with SGLang's sources, which are read, not imported."""

from __future__ import annotations

import argparse
import ast
import functools
from pathlib import Path

import pytest
from support.peer_sources import FOLDER, MISSING

from flashlatte.bench.serving import sglang_engine, sglang_steps
from flashlatte.bench.serving.random_model import CONFIGS

# The version that .ci/sglang_archive.py packs.
SOURCE = FOLDER / "sglang-0.5.17" / "sglang"

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason=MISSING)


@functools.cache
def parsed(place: str) -> ast.Module:
    return ast.parse((SOURCE / place).read_text())


def function(place: str, path: str) -> ast.FunctionDef:
    """A function of a file, or of a class in it ("Class.function")."""
    body = parsed(place).body
    for name in path.split("."):
        (found,) = (node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def defined(tree: ast.AST) -> set[str]:
    """Names that a module defines or imports, and attributes that it assigns."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


ONE_BATCH, BATCH, POOL = "benchmark/one_batch.py", "srt/managers/schedule_batch.py", "srt/mem_cache/memory_pool.py"
# Positional arguments of each call, those of methods without self, and its keywords.
CALLS = [
    (ONE_BATCH, "load_model", 4, ()),
    (ONE_BATCH, "prepare_synthetic_inputs_for_latency_test", 3, ()),
    (ONE_BATCH, "_TorchBenchRunner.clear", 0, ()),
    (ONE_BATCH, "_TorchBenchRunner.extend", 1, ()),
    (ONE_BATCH, "_TorchBenchRunner.decode", 2, ()),
    (
        BATCH,
        "ScheduleBatch.init_new",
        0,
        (
            "reqs",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "model_config",
            "enable_overlap",
            "spec_algorithm",
        ),
    ),
    (BATCH, "ScheduleBatch.prepare_for_extend", 0, ()),
    (BATCH, "Req.set_extend_range", 2, ()),
    (POOL, "MLATokenToKVPool.set_mla_kv_buffer", 4, ()),
    (POOL, "DSATokenToKVPool.set_index_k_scale_buffer", 4, ()),
    ("srt/plugins/__init__.py", "load_plugins", 0, ()),
    ("srt/server_args.py", "PortArgs.init_new", 1, ()),
    ("srt/entrypoints/engine.py", "_set_envs_and_config", 1, ()),
    ("srt/layers/moe/utils.py", "initialize_moe_config", 1, ()),
    ("srt/layers/quantization/fp8_utils.py", "initialize_fp8_gemm_config", 1, ()),
    ("srt/layers/quantization/fp4_utils.py", "initialize_fp4_gemm_config", 1, ()),
]


@pytest.mark.parametrize(("place", "path", "positional", "keywords"), CALLS, ids=[path for _, path, *_ in CALLS])
def test_calls_are_accepted(place: str, path: str, positional: int, keywords: tuple[str, ...]) -> None:
    arguments = function(place, path).args
    names = [argument.arg for argument in arguments.args]
    if names[:1] in (["self"], ["cls"]):
        del names[0]
    needed = names[: len(names) - len(arguments.defaults)]
    assert not any(default is None for default in arguments.kw_defaults)
    assert set(needed) - set(names[:positional]) <= set(keywords)
    assert set(keywords) <= set(names[positional:])
    assert positional <= len(names)


@pytest.mark.parametrize(
    ("place", "used"),
    [
        (
            ONE_BATCH,
            {
                "_set_envs_and_config",
                "get_tokenizer",
                "initialize_fp4_gemm_config",
                "initialize_fp8_gemm_config",
                "initialize_moe_config",
                "ScheduleBatch",
                "SpeculativeAlgorithm",
                "torch_runner",
                "TreeCacheNamespace",
            },
        ),
        (BATCH, {"out_cache_loc", "prefill_input_ids_cpu", "prefix_indices", "req_pool_idx", "origin_input_ids"}),
        (POOL, {"layer_num", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "req_to_token"}),
        ("srt/model_loader/loader.py", {"initialize_dummy_weights"}),
        ("srt/server_args.py", {"cuda_graph_config", "dsa_decode_backend", "dsa_prefill_backend", "page_size"}),
        (
            "srt/model_executor/model_runner.py",
            {
                "decode_attention_backend_str",
                "device",
                "kv_cache_dtype",
                "model_config",
                "prefill_attention_backend_str",
                "req_to_token_pool",
                "server_args",
                "token_to_kv_pool",
                "token_to_kv_pool_allocator",
            },
        ),
    ],
)
def test_names_exist(place: str, used: set[str]) -> None:
    assert used - defined(parsed(place)) == set()


@pytest.mark.parametrize("model", ["v3", "v32"])
@pytest.mark.parametrize("layers", ["DeepseekV2DecoderLayer", "DeepseekV2Model"])
def test_config_has_the_attributes_that_the_model_reads(model: str, layers: str) -> None:
    transformers = pytest.importorskip("transformers")
    (found,) = (
        node
        for node in parsed("srt/models/deepseek_v2.py").body
        if isinstance(node, ast.ClassDef) and node.name == layers
    )
    reads = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")
    }
    assert "rms_norm_eps" in reads
    config = transformers.DeepseekV3Config(**CONFIGS[model])
    assert {name for name in reads - set(CONFIGS[model]) if not hasattr(config, name)} == set()


def test_dummy_weights_are_initialized_through_the_module_that_is_patched() -> None:
    loader = function("srt/model_loader/loader.py", "DummyModelLoader.load_model")
    calls = [node for node in ast.walk(loader) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    (call,) = (call for call in calls if getattr(call.func, "id", "") == "initialize_dummy_weights")
    assert len(call.args) == 1


def test_server_arguments_exist(tmp_path: Path) -> None:
    (arguments,) = (
        node
        for node in parsed("srt/server_args.py").body
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
    )
    fields = defined(arguments)
    parser = argparse.ArgumentParser()
    sglang_steps.add_arguments(parser)
    for server in sglang_steps.BACKENDS.values():
        options = parser.parse_args(["v3"])
        given = sglang_engine.server_options(argparse.Namespace(**vars(options), model="folder", server=server))
        assert set(given) - fields == set()


def test_attention_backends_are_sglangs() -> None:
    choices = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in parsed("srt/server_args.py").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id in ("ATTENTION_BACKEND_CHOICES", "DSA_CHOICES")
    }
    for server in sglang_steps.BACKENDS.values():
        for name, value in server.items():
            if name.endswith("_backend"):
                assert value in choices["DSA_CHOICES" if name.startswith("dsa") else "ATTENTION_BACKEND_CHOICES"]
