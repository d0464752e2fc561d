"""Makes Triton's interpreter twice as fast, by caching repeated work; results are unchanged.

Without it, every call, also of a device function within a kernel, searches all of ``triton.language`` for functions to
patch; every scalar rebuilds the table of types; and the shape of every block is unwrapped, checked and wrapped again.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_interpreter: Any = interpreter
_patch_lang = _interpreter._patch_lang
_get_np_dtype = _interpreter._get_np_dtype
_core: Any = tl.core
_make_block_type = _core.block_type.__init__
_make_tensor = _core.tensor.__init__
_modules: dict[Any, list[Any]] = {}
_dtypes: dict[str, Any] = {}


# Cached attributes by shape: those of a block type (shape, numel, the shape as text), and of a tensor (shape, numel).
_of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}


def install() -> None:
    # For tests' own kernels too, which are not FlashLatte's kernel objects.
    importlib.import_module("flashlatte.runtime.interpreted_kernel")
    _interpreter._patch_lang = patch_lang
    _interpreter._get_np_dtype = get_np_dtype
    _core.block_type.__init__ = make_block_type
    _core.tensor.__init__ = make_tensor


def patch_lang(function: Any) -> Any:
    """``_patch_lang``, which does nothing if the functions are already patched, as in calls within a kernel."""
    if function not in _modules:
        _modules[function] = [one for one in (tl, tl.core) if any(one is it for it in function.__globals__.values())]
    if _modules[function] and not any(tl.core.is_builtin(module.load) for module in _modules[function]):
        return _interpreter._LangPatchScope()
    return _patch_lang(function)


def get_np_dtype(type_: Any) -> Any:
    """``_get_np_dtype``, cached by scalar type."""
    name = type_.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _get_np_dtype(type_.scalar)
    return _dtypes[name]


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``block_type.__init__``, which checks each shape only once."""
    key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _of_types:
        _make_block_type(self, element_ty, shape)
        _of_types[key] = self.shape, self.numel, str(self.shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, text = _of_types[key]
    self.name = f"<{text}, {element_ty}>"


def make_tensor(self: Any, handle: Any, type_: Any) -> None:
    """``tensor.__init__``, in which tensors of the same shape share the wrapped shape."""
    key = (*type_.shape,) if type_.is_block() else ()
    if key not in _of_tensors:
        _make_tensor(self, handle, type_)
        _of_tensors[key] = self.shape, self.numel
        return
    self.handle = handle
    self.type = type_
    self.dtype = type_.scalar
    self.shape, self.numel = _of_tensors[key]
