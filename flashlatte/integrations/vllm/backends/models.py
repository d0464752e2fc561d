"""vLLM's models with an indexer, which use FlashLatte's indexer if the configuration selects FlashLatte.

On CUDA, vLLM's fused kernels of DeepSeek-V3.2 and GLM-5 apply norms and RoPE and write both caches; FlashLatte reads
their bytes unchanged. Hy4's layers call PyTorch modules and the indexer one after the other.
"""

from __future__ import annotations

import importlib
from typing import Any

from flashlatte.integrations.vllm.backends import indexer

PACKAGES = {
    "DeepseekV32ForCausalLM": "vllm.models.deepseek_v32",
    "GlmMoeDsaForCausalLM": "vllm.models.deepseek_v32",
    "HYV4ForCausalLM": "vllm.models.hy_v4",
}


def __getattr__(architecture: str) -> Any:
    """vLLM's model class, after FlashLatte has replaced the indexer in its package."""
    if architecture not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {architecture!r}")
    model = getattr(importlib.import_module(PACKAGES[architecture]), architecture)
    if architecture == "HYV4ForCausalLM":
        indexer.install_in("vllm.models.hy_v4.nvidia.attention")
    else:
        indexer.install()
    return model
