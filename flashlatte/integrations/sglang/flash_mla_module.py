"""A module ``flash_mla`` made of FlashLatte's interface, so that SGLang's own interface module can be imported."""

from __future__ import annotations

import importlib
import sys
import types

from flashlatte import flash_mla

# Exceptions from importing a package whose compiled code does not fit the machine. SGLang ignores the same ones.
NOT_IMPORTABLE = (ImportError, OSError, RuntimeError)
# Fused attention, which SGLang imports even if it does not use it.
_FUSED = "flash_mla.fused_norm_rope_attn_rope_cast"


class _PlaceholderModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{self.__name__}.{name} needs the package sgl-flash-mla, which cannot be imported here")


def provide_flash_mla() -> None:
    """Make ``import flash_mla`` work for SGLang: the installed package if it can be imported, else FlashLatte's.

    FlashMLA and FlashLatte's alias lack SGLang's module of fused attention; an empty module is registered for it.
    """
    try:
        package = importlib.import_module("flash_mla")
    except NOT_IMPORTABLE:
        package = _PlaceholderModule("flash_mla", flash_mla.__doc__)
        interface = _PlaceholderModule("flash_mla.flash_mla_interface", flash_mla.__doc__)
        for module in (package, interface):
            module.__dict__.update({name: getattr(flash_mla, name) for name in flash_mla.__all__})
        package.__dict__["__path__"] = []
        package.__dict__["flash_mla_interface"] = interface
        sys.modules |= {module.__name__: module for module in (package, interface)}
    try:
        importlib.import_module(_FUSED)
    except NOT_IMPORTABLE:
        sys.modules[_FUSED] = package.__dict__["fused_norm_rope_attn_rope_cast"] = _PlaceholderModule(_FUSED)
