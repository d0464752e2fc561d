"""FlashLatte's index logits in vLLM's own indexer, for a comparison of attention where DeepGEMM is not installed."""

from __future__ import annotations

import importlib.util
import sys

from flashlatte import deep_gemm

# vLLM imports the first one that it finds.
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")


def replace_missing_deep_gemm() -> bool:
    """Let ``import deep_gemm`` import FlashLatte's functions if DeepGEMM is not installed.

    vLLM's indexer of DeepSeek-V3.2 takes its logits from DeepGEMM, and refuses to start without it. vLLM remembers
    whether it found DeepGEMM: call this before vLLM's engine is built.

    Returns:
        whether FlashLatte's functions are used.
    """
    if any(map(_is_installed, DEEP_GEMM)):
        return False
    sys.modules["deep_gemm"] = deep_gemm
    return True


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that contains it
        return False
