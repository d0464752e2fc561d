"""FlashLatte inside vLLM: a plugin that vLLM finds by itself once both are installed.

``vllm serve MODEL --attention-backend CUSTOM`` then serves multi-head latent attention with FlashLatte. With
``FLASHLATTE_VLLM=auto`` in the environment no option is needed: what vLLM would choose itself is FlashLatte.
``VLLM_PLUGINS`` without ``flashlatte`` leaves the plugin out.

vLLM imports ``backends``; nothing else here imports vLLM before it is asked to.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from flashlatte.integrations.vllm import compat, support

__all__ = ["cpu_platform", "register"]

ON_CPU = "FLASHLATTE_VLLM_CPU"
MODES = ("custom", "auto")
CUSTOM = "flashlatte.integrations.vllm.backends.custom.FlashLatteBackend"
DENSE = "flashlatte.integrations.vllm.backends.dense.FlashLatteMLABackend"
SPARSE = "flashlatte.integrations.vllm.backends.sparse.FlashLatteSparseMLABackend"
MODELS = "flashlatte.integrations.vllm.backends.models"
MODELS_V4 = "flashlatte.integrations.vllm.backends.models_v4"
PREFILL = "flashlatte.integrations.vllm.backends.prefill.FlashLattePrefillBackend"
CPU_PLATFORM = "flashlatte.integrations.vllm.backends.cpu.FlashLatteCpuPlatform"


def register() -> None:
    """Make FlashLatte's backends known to vLLM: entry point ``flashlatte`` of group ``vllm.general_plugins``.

    vLLM calls it in each of its processes, some more than once. ``FLASHLATTE_VLLM`` tells what is registered:

    * ``custom``, the default: the name CUSTOM stands for FlashLatte's backends, of attention and of prefill, and for
      FlashLatte's indexer in models that have one (vLLM 0.32 and later).
    * ``auto``: so do the names of vLLM's own MLA backends but TRITON_MLA. Whichever vLLM chooses is FlashLatte, or, if
      FlashLatte refuses the model or an option, TRITON_MLA.

    DeepSeek-V4, whose layers take no attention backend, has FlashLatte's attention and indexer's choice where CUSTOM is
    named for it (vLLM 0.32 and later, on CUDA). DeepSeek-V4.1 is refused there.

    Where vLLM is missing or of a version that FlashLatte does not know, it says so once and registers nothing.

    Raises:
        ValueError: ``FLASHLATTE_VLLM`` is something else.
    """
    chosen = mode()
    reason = compat.version_refusal()
    if reason is not None:
        compat.warn_once("FlashLatte is not registered: %s", reason)
        return
    compat.register_attention("CUSTOM", CUSTOM)
    compat.register_prefill("CUSTOM", PREFILL)
    compat.configure_models(support.V4_MODELS, before=configure_v4_model)
    compat.configure_models(
        support.V41_MODELS, before=lambda config, _: support.refuse(config, support.V41_UNSUPPORTED)
    )
    on_cpu = os.environ.get(ON_CPU) == "1" and compat.cpu_refusal() is None
    if not on_cpu and compat.indexer_refusal() is None:
        compat.configure_models(support.INDEXER_MODELS, after=configure_indexer_model)
    if chosen == "auto":
        for name in compat.AUTOMATIC_DENSE:
            compat.register_attention(name, DENSE)
    if on_cpu:
        importlib.import_module("flashlatte.integrations.vllm.backends.indexer").install_for_cpu()


def configure_indexer_model(vllm_config: Any, architecture: str) -> None:
    """Have vLLM make a model with an indexer from ``MODELS`` where FlashLatte is named for it.

    Any fp8 cache is DeepSeek's, as it is for vLLM's own backend of these kernels. A class that the user names stays.
    """
    if not support.selects_flashlatte(vllm_config):
        return
    vllm_config.model_config.model_class_overrides.setdefault(architecture, f"{MODELS}:{architecture}")
    cache = vllm_config.cache_config
    if cache.cache_dtype in ("fp8", "fp8_e4m3"):
        cache.cache_dtype = "fp8_ds_mla"


def configure_v4_model(vllm_config: Any, architecture: str) -> None:
    """Have vLLM make DeepSeek-V4 from ``MODELS_V4`` where FlashLatte is named for it.

    A class that the user names stays.

    Raises:
        ValueError: FlashLatte is named, and does not serve it in this vLLM or on this platform.
    """
    if not support.selects_flashlatte(vllm_config):
        return
    support.refuse(vllm_config, compat.v4_refusal() or (None if compat.on_cuda() else support.V4_NEEDS_CUDA))
    vllm_config.model_config.model_class_overrides.setdefault(architecture, f"{MODELS_V4}:{architecture}")


def mode() -> str:
    """What ``FLASHLATTE_VLLM`` says, "custom" if nothing."""
    chosen = os.environ.get("FLASHLATTE_VLLM") or MODES[0]
    if chosen not in MODES:
        raise ValueError(f"FLASHLATTE_VLLM must be {' or '.join(MODES)}, got {chosen!r}")
    return chosen


def cpu_platform() -> str | None:
    """The class of a vLLM platform for CPUs: entry point ``flashlatte_cpu`` of group ``vllm.platform_plugins``.

    Only with ``FLASHLATTE_VLLM_CPU=1``, and a vLLM of 0.32 or later that is built for CPUs; else None, and vLLM looks
    for its own platform. It computes with FlashLatte's reference implementations, to try and to test without a GPU:
    prefix caching, chunked prefill and any page size, which vLLM's own MLA backend for CPUs does not have.
    """
    if os.environ.get(ON_CPU) != "1":
        return None
    reason = compat.cpu_refusal()
    if reason is not None:
        compat.warn_once("FlashLatte has no platform for CPUs: %s", reason)
        return None
    return CPU_PLATFORM
