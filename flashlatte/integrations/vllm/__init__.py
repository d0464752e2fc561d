"""FlashLatte inside vLLM: a plugin that vLLM finds by itself once both are installed.

``vllm serve MODEL --attention-backend CUSTOM`` then serves multi-head latent attention with FlashLatte. With
``FLASHLATTE_VLLM=auto`` in the environment no option is needed: what vLLM would choose itself is FlashLatte.
``VLLM_PLUGINS`` without ``flashlatte`` leaves the plugin out.

vLLM imports ``backends``; nothing else here imports vLLM before it is asked to.
"""

from __future__ import annotations

import importlib
import os

from flashlatte.integrations.vllm import compat, serves

__all__ = ["cpu_platform", "register"]

ON_CPU = "FLASHLATTE_VLLM_CPU"
MODES = ("custom", "auto")
DENSE = "flashlatte.integrations.vllm.backends.dense.FlashLatteMLABackend"
SPARSE = "flashlatte.integrations.vllm.backends.sparse.FlashLatteSparseMLABackend"
PREFILL = "flashlatte.integrations.vllm.backends.prefill.FlashLattePrefillBackend"
CPU_PLATFORM = "flashlatte.integrations.vllm.backends.cpu.FlashLatteCpuPlatform"


def register() -> None:
    """Make FlashLatte's backends known to vLLM: entry point ``flashlatte`` of group ``vllm.general_plugins``.

    vLLM calls it in each of its processes, some more than once. ``FLASHLATTE_VLLM`` tells what is registered:

    * ``custom``, the default: the name CUSTOM stands for FlashLatte's backends, of attention and of prefill.
    * ``auto``: so do the names of vLLM's own MLA backends but TRITON_MLA. Whichever vLLM chooses is FlashLatte, or, if
      FlashLatte refuses the model or an option, TRITON_MLA.

    DeepSeek-V4's models, which take no attention backend, are refused where CUSTOM is named for them.

    Where vLLM is missing or of a version that FlashLatte does not know, it says so once and registers nothing.

    Raises:
        ValueError: ``FLASHLATTE_VLLM`` is something else.
    """
    chosen = mode()
    reason = compat.unknown()
    if reason is not None:
        compat.say_once("FlashLatte is not registered: %s", reason)
        return
    compat.register_attention("CUSTOM", DENSE)
    compat.register_prefill("CUSTOM", PREFILL)
    compat.check_models(serves.V4_MODELS, serves.check_v4)
    if chosen == "auto":
        for name in compat.AUTOMATIC_DENSE:
            compat.register_attention(name, DENSE)
    if os.environ.get(ON_CPU) == "1" and compat.unknown_on_cpus() is None:
        importlib.import_module("flashlatte.integrations.vllm.backends.indexer").install_for_cpu()


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
    reason = compat.unknown_on_cpus()
    if reason is not None:
        compat.say_once("FlashLatte has no platform for CPUs: %s", reason)
        return None
    return CPU_PLATFORM
