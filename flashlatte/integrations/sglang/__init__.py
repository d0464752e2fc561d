"""FlashLatte inside SGLang: a plugin that serves MLA's attention, the indexer's logits and its top-k.

``register`` is the entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes where FlashLatte is
installed. ``SGLANG_PLUGINS`` names the plugins to load, this one being ``flashlatte``.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from typing import Any

import torch

from flashlatte.integrations.sglang.flash_mla_module import NOT_IMPORTABLE, provide_flash_mla
from flashlatte.integrations.sglang.hooks import HOOKS, Hook, unserved

__all__ = ["register"]

_REGISTRY = "sglang.srt.plugins.hook_registry"
_logger = logging.getLogger(__name__)
_registered: set[str] = set()


def register() -> None:
    """Tell SGLang which of its functions are served here; without effect where SGLang or an NVIDIA GPU is missing.

    It may be called again. A function that the installed SGLang does not have is passed over, and a warning says so.
    """
    try:
        registry: Any = importlib.import_module(_REGISTRY)
    except ImportError:
        _logger.warning("FlashLatte: SGLang's plugins are not there, so nothing is registered.")
        return
    if not torch.cuda.is_available() or torch.version.hip is not None:
        _logger.info("FlashLatte: no NVIDIA GPU, so SGLang keeps its own attention.")
        return
    register_hooks(registry.HookRegistry, registry.HookType)


def register_hooks(registry: Any, hook_types: Any) -> None:
    """Register each hook whose target exists, once."""
    provide_flash_mla()
    for hook in HOOKS:
        if hook.target not in _registered and _exists(hook):
            registry.register(hook.target, hook.function, hook_types.AROUND if hook.around else hook_types.REPLACE)
            _registered.add(hook.target)
    if missing := unserved(lambda hook: hook.target in _registered):
        _logger.warning("FlashLatte: this SGLang does not have %s, which is not served.", ", ".join(missing))


def _exists(hook: Hook) -> bool:
    try:
        pkgutil.resolve_name(hook.target)
    except (AttributeError, *NOT_IMPORTABLE):
        return False
    return True
