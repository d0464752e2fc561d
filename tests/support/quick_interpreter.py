"""Triton's interpreter without what it does over and over, a third of its time. Results are its own.

Before every call, one of a device function within a kernel too, it looks through all of ``triton.language`` for what to
replace; and for every number that it makes it writes down the table of types anew.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_interpreter: Any = interpreter
_patch_lang = _interpreter._patch_lang
_get_np_dtype = _interpreter._get_np_dtype
_modules: dict[Any, list[Any]] = {}
_dtypes: dict[str, Any] = {}


def install() -> None:
    _interpreter._patch_lang = patch_lang
    _interpreter._get_np_dtype = get_np_dtype


def patch_lang(function: Any) -> Any:
    """``_patch_lang``, which does nothing where the functions are replaced already: in what a kernel calls."""
    if function not in _modules:
        _modules[function] = [one for one in (tl, tl.core) if any(one is it for it in function.__globals__.values())]
    if _modules[function] and not any(tl.core.is_builtin(module.load) for module in _modules[function]):
        return _interpreter._LangPatchScope()
    return _patch_lang(function)


def get_np_dtype(type_: Any) -> Any:
    """``_get_np_dtype``, whose answer depends on what a single number of a type is."""
    name = type_.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _get_np_dtype(type_.scalar)
    return _dtypes[name]
