"""A module ``flash_mla`` where none can be imported: SGLang's interface to it is the place that is hooked."""

from __future__ import annotations

import importlib
import sys
import types

from flashlatte import flash_mla

# What importing a package with compiled parts raises that does not fit the machine; SGLang passes over these too.
NOT_IMPORTABLE = (ImportError, OSError, RuntimeError)
# Attention fused with what stands around it, which SGLang imports whether or not it will be used.
_FUSED = "flash_mla.fused_norm_rope_attn_rope_cast"


class _Missing(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{self.__name__}.{name} needs the package sgl-flash-mla, which cannot be imported here")


def provide_flash_mla() -> None:
    """Make ``import flash_mla`` work for SGLang: the installed package if it can be imported, else this library's.

    FlashMLA itself, and this library's alias of it, are without SGLang's fused attention, and are given its name.
    """
    try:
        package = importlib.import_module("flash_mla")
    except NOT_IMPORTABLE:
        package = _Missing("flash_mla", flash_mla.__doc__)
        interface = _Missing("flash_mla.flash_mla_interface", flash_mla.__doc__)
        for module in (package, interface):
            module.__dict__.update({name: getattr(flash_mla, name) for name in flash_mla.__all__})
        package.__dict__["__path__"] = []
        package.__dict__["flash_mla_interface"] = interface
        sys.modules |= {module.__name__: module for module in (package, interface)}
    try:
        importlib.import_module(_FUSED)
    except NOT_IMPORTABLE:
        sys.modules[_FUSED] = package.__dict__["fused_norm_rope_attn_rope_cast"] = _Missing(_FUSED)
