import importlib.util
import os
from pathlib import Path

import pytest

# Tests that need vLLM: make test-vllm.
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*_engine.py"]
else:
    # vLLM reads these at its first import: FlashLatte's CPU platform, the engine in this process, no network.
    os.environ |= {
        "FLASHLATTE_VLLM_CPU": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM inspects model classes in another process; those of the tests are in ``support``.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }


@pytest.fixture(autouse=True)
def own_models():
    """``model_class_overrides`` replaces models for the rest of the process: take it back after each test."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    from vllm.config import model  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader import utils  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]

    known = dict(ModelRegistry.models)
    yield
    ModelRegistry.models.clear()
    ModelRegistry.models.update(known)
    # vLLM replaces a model once in a process, and remembers a checkpoint's class without its overrides.
    model._REGISTERED_MODEL_CLASS_OVERRIDES.clear()
    utils._MODEL_ARCH_BY_HASH.clear()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Creates a small random model of a family, with changes to its configuration; returns its path."""
    from support import tiny_checkpoints

    written = {}

    def path(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in written:
            written[key] = tiny_checkpoints.write(family, tmp_path_factory.mktemp(family), **changes)
        return written[key]

    return path


@pytest.fixture
def own_process(monkeypatch):
    """Run the engine in its own process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture
def exact_indexer(monkeypatch):
    """Keep index queries and keys in float32, as in transformers."""
    import torch
    from vllm.plugins import load_general_plugins  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_cache_interface import MLAAttentionSpec  # pyright: ignore[reportMissingImports]

    load_general_plugins()
    from support import vllm_fused_model

    from flashlatte.integrations.vllm.backends import indexer

    def spec(self, config):
        size = self.cache_config.block_size
        return MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=128, dtype=torch.float32)

    def unquantized(x, group_size, **_):
        return x.float(), torch.ones(x.shape[0], x.shape[1] // group_size)

    monkeypatch.setattr(indexer.FlashLatteIndexerCache, "get_kv_cache_spec", spec)
    for name in ("model_executor.models.deepseek_v2", "models.hy_v4.nvidia.attention"):
        indexer.install_in(f"vllm.{name}")
        monkeypatch.setattr(f"vllm.{name}.per_token_group_quant_fp8", unquantized)
    monkeypatch.setattr(vllm_fused_model, "quantize_queries", lambda x: (x, torch.ones_like(x[..., :1])))
