"""vLLM plugin: vLLM finds it when both packages are installed.

``vllm serve MODEL --attention-backend CUSTOM`` runs multi-head latent attention with FlashLatte. With
``FLASHLATTE_VLLM=auto`` in the environment no option is needed: FlashLatte replaces the backend that vLLM chooses.
``VLLM_PLUGINS`` without ``flashlatte`` disables the plugin.

Only ``backends``, which vLLM imports, imports vLLM at module level. The other modules import it inside functions.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from flashlatte.integrations import decode_precision
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
    """Register FlashLatte's backends with vLLM: entry point ``flashlatte`` of group ``vllm.general_plugins``.

    vLLM calls it in each of its processes, and in some of them more than once. ``FLASHLATTE_VLLM`` selects what is
    registered:

    * ``custom``, the default: the name CUSTOM selects FlashLatte's attention and prefill backends, and FlashLatte's
      indexer in DeepSeek-V3.2, GLM-5 and Hy4 (vLLM 0.32 and later).
    * ``auto``: the names of vLLM's own MLA backends except TRITON_MLA also select FlashLatte. If FlashLatte refuses the
      model or an option, vLLM falls back to TRITON_MLA.

    DeepSeek-V4's layers take no attention backend. With CUSTOM they use FlashLatte's attention and indexer selection
    (vLLM 0.32 and later, on CUDA). DeepSeek-V4.1 and dots3 with CUSTOM are refused.

    ``FLASHLATTE_DECODE_PRECISION=fp8`` selects products in e4m3 for decode over an fp8 cache. A configuration in which
    it would have no effect is refused (``check_decode_precision``).

    If vLLM is missing or its version is not supported, the function logs one warning and registers nothing.

    Raises:
        ValueError: ``FLASHLATTE_VLLM`` or ``FLASHLATTE_DECODE_PRECISION`` has another value.
    """
    chosen, precision = mode(), decode_precision.requested()
    reason = compat.version_refusal()
    if reason is not None:
        compat.warn_once("FlashLatte is not registered: %s", reason)
        return
    compat.register_attention("CUSTOM", CUSTOM)
    compat.register_prefill("CUSTOM", PREFILL)
    compat.configure_models(support.V4_MODELS, before=configure_v4_model)
    for models, reason in (
        (support.V41_MODELS, support.V41_UNSUPPORTED),
        (support.DOTS3_MODELS, support.DOTS3_UNSUPPORTED),
    ):
        compat.configure_models(models, before=lambda config, _, reason=reason: support.refuse(config, reason))
    compat.configure_models(support.KIMI_MODELS, before=check_kimi_model)
    on_cpu = os.environ.get(ON_CPU) == "1" and compat.cpu_refusal() is None
    if compat.indexer_refusal() is None:
        models = support.CPU_INDEXER_MODELS if on_cpu else support.INDEXER_MODELS
        compat.configure_models(models, after=configure_indexer_model)
        compat.configure_models(support.GLM_NEXT_MODELS, after=use_ds_mla_cache)
    if precision is not None:
        compat.configure_models(compat.architectures(), before=check_decode_precision, mark="precision_checked")
    if chosen == "auto":
        for name in compat.AUTOMATIC_DENSE:
            compat.register_attention(name, DENSE)
    if on_cpu:
        indexer = importlib.import_module("flashlatte.integrations.vllm.backends.indexer")
        indexer.install_in("vllm.model_executor.models.deepseek_v2")


def configure_indexer_model(vllm_config: Any, architecture: str) -> None:
    """Let vLLM load a model with an indexer from ``MODELS`` if its configuration selects FlashLatte.

    An fp8 cache becomes ``fp8_ds_mla``, as with vLLM's own sparse MLA backends. A model class that the user configured
    is kept.
    """
    if support.selects_flashlatte(vllm_config):
        vllm_config.model_config.model_class_overrides.setdefault(architecture, f"{MODELS}:{architecture}")
        use_ds_mla_cache(vllm_config, architecture)


def use_ds_mla_cache(vllm_config: Any, architecture: str) -> None:
    """Store an fp8 cache as ``fp8_ds_mla`` if the configuration selects FlashLatte."""
    cache = vllm_config.cache_config
    if support.selects_flashlatte(vllm_config) and cache.cache_dtype in ("fp8", "fp8_e4m3"):
        cache.cache_dtype = "fp8_ds_mla"


def check_kimi_model(vllm_config: Any, architecture: str) -> None:
    """Refuse an fp8 cache of Kimi-Linear and Kimi-K3 if the configuration selects FlashLatte.

    Raises:
        ValueError: the configuration selects FlashLatte and an fp8 cache.
    """
    is_fp8 = vllm_config.cache_config.cache_dtype.startswith("fp8")
    support.refuse(vllm_config, support.KIMI_FP8_UNSUPPORTED if is_fp8 else None)


def check_decode_precision(vllm_config: Any, architecture: str) -> None:
    """Refuse a configuration in which ``FLASHLATTE_DECODE_PRECISION`` has no effect, or that merges results by lse.

    The backends check the cache, the layers and the GPU. A draft model may use another backend.

    Raises:
        ValueError: the configuration does not select FlashLatte, has another kind of attention than ``dense_decode``,
            or uses decode context parallelism.
    """
    if vllm_config.model_config.runner_type == "draft":
        return
    if not support.selects_flashlatte(vllm_config):
        raise ValueError(decode_precision.needs_message("--attention-backend CUSTOM"))
    if architecture in support.V4_MODELS:
        raise ValueError(decode_precision.needs_message(support.PRECISION_NEEDS))
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise ValueError(
            decode_precision.needs_message("decode without context parallelism, which merges results by lse")
        )


def configure_v4_model(vllm_config: Any, architecture: str) -> None:
    """Let vLLM load DeepSeek-V4 from ``MODELS_V4`` if its configuration selects FlashLatte.

    A model class that the user configured is kept.

    Raises:
        ValueError: the configuration selects FlashLatte, which does not support V4 in this vLLM or on this platform.
    """
    if not support.selects_flashlatte(vllm_config):
        return
    support.refuse(vllm_config, compat.v4_refusal() or _v4_gpu_refusal())
    vllm_config.model_config.model_class_overrides.setdefault(architecture, f"{MODELS_V4}:{architecture}")


def _v4_gpu_refusal() -> str | None:
    """Why FlashLatte does not support DeepSeek-V4 on this platform, or None."""
    if not compat.on_cuda():
        return support.V4_NEEDS_CUDA
    return None if compat.converts_e4m3() else support.V4_NEEDS_E4M3


def mode() -> str:
    """The value of ``FLASHLATTE_VLLM``; "custom" if it is unset or empty."""
    chosen = os.environ.get("FLASHLATTE_VLLM") or MODES[0]
    if chosen not in MODES:
        raise ValueError(f"FLASHLATTE_VLLM must be {' or '.join(MODES)}, got {chosen!r}")
    return chosen


def cpu_platform() -> str | None:
    """The path of a vLLM platform class for CPUs: entry point ``flashlatte_cpu`` of group ``vllm.platform_plugins``.

    It needs ``FLASHLATTE_VLLM_CPU=1`` and a CPU build of vLLM 0.32 or later. Otherwise the result is None, and vLLM
    uses its own platform. The platform runs FlashLatte's reference implementations, for tests without a GPU. It has
    prefix caching, chunked prefill and any page size, which vLLM's own MLA backend for CPUs does not.
    """
    if os.environ.get(ON_CPU) != "1":
        return None
    reason = compat.cpu_refusal()
    if reason is not None:
        compat.warn_once("FlashLatte has no platform for CPUs: %s", reason)
        return None
    return CPU_PLATFORM
