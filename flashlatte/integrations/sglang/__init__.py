"""SGLang plugin: replaces MLA attention, the indexer's logits and its top-k.

``register`` is the entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes if FlashLatte is
installed. ``SGLANG_PLUGINS`` lists the plugins to load; this one is called ``flashlatte``.
``FLASHLATTE_DECODE_PRECISION=fp8`` selects products in e4m3 for dense decode over an fp8 cache.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from typing import Any

import torch

from flashlatte.integrations.sglang.flash_mla_module import NOT_IMPORTABLE, provide_flash_mla
from flashlatte.integrations.sglang.hooks import Hook, active_hooks, missing_targets

__all__ = ["register"]

_REGISTRY = "sglang.srt.plugins.hook_registry"
_logger = logging.getLogger(__name__)
_registered: set[str] = set()


def register() -> None:
    """Register the hooks that replace SGLang's functions. Without effect if SGLang or an NVIDIA GPU is missing.

    Repeated calls are safe. Functions that the installed SGLang lacks are skipped and named in a warning.
    """
    try:
        registry: Any = importlib.import_module(_REGISTRY)
    except ImportError:
        _logger.warning("FlashLatte: SGLang has no plugin registry, so nothing is registered.")
        return
    if not torch.cuda.is_available() or torch.version.hip is not None:
        _logger.info("FlashLatte: no NVIDIA GPU, so SGLang keeps its own attention.")
        return
    register_hooks(registry.HookRegistry, registry.HookType)


def register_hooks(registry: Any, hook_types: Any) -> None:
    """Register each hook whose target exists; skip hooks that are registered already."""
    provide_flash_mla()
    for hook in active_hooks():
        if hook.target not in _registered and _exists(hook):
            registry.register(hook.target, hook.function, hook_types.AROUND if hook.around else hook_types.REPLACE)
            _registered.add(hook.target)
    if missing := missing_targets(lambda hook: hook.target in _registered):
        _logger.warning("FlashLatte: this SGLang lacks %s, which FlashLatte does not replace.", ", ".join(missing))


def _exists(hook: Hook) -> bool:
    try:
        pkgutil.resolve_name(hook.target)
    except (AttributeError, *NOT_IMPORTABLE):
        return False
    return True
