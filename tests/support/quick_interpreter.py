"""Triton's interpreter without what it does over and over, half of its time. Results are its own.

Before every call, one of a device function within a kernel too, it looks through all of ``triton.language`` for what to
replace; for every number that it makes it writes down the table of types anew; and every block's shape is unwrapped,
checked and wrapped again.

And with two defects less: what compares two numbers keeps their type, so that as a block it is one of integers, which
Triton 3.9 does not take for a mask any more; and Triton 3.6 counts a loop by an array of one number, which NumPy 2.4
does not take for a number any more.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_interpreter: Any = interpreter
_patch_lang = _interpreter._patch_lang
_get_np_dtype = _interpreter._get_np_dtype
_core: Any = tl.core
_make_block_type = _core.block_type.__init__
_make_tensor = _core.tensor.__init__
_create_splat = _interpreter.InterpreterBuilder.create_splat
_patch_lang_tensor = _interpreter._patch_lang_tensor
_modules: dict[Any, list[Any]] = {}
_dtypes: dict[str, Any] = {}


# By shape: what a type has of it, the last as text, and what a tensor has.
_of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}


def install() -> None:
    _interpreter._patch_lang = patch_lang
    _interpreter._get_np_dtype = get_np_dtype
    _core.block_type.__init__ = make_block_type
    _core.tensor.__init__ = make_tensor
    _interpreter.InterpreterBuilder.create_splat = create_splat
    _interpreter._patch_lang_tensor = patch_lang_tensor


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


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``block_type.__init__``, whose checks of a shape pass again if they passed."""
    key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _of_types:
        _make_block_type(self, element_ty, shape)
        _of_types[key] = self.shape, self.numel, str(self.shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, text = _of_types[key]
    self.name = f"<{text}, {element_ty}>"


def make_tensor(self: Any, handle: Any, type_: Any) -> None:
    """``tensor.__init__``, where tensors of a shape share what it is wrapped in."""
    key = (*type_.shape,) if type_.is_block() else ()
    if key not in _of_tensors:
        _make_tensor(self, handle, type_)
        _of_tensors[key] = self.shape, self.numel
        return
    self.handle = handle
    self.type = type_
    self.dtype = type_.scalar
    self.shape, self.numel = _of_tensors[key]


def create_splat(self: Any, type_: Any, number: Any) -> Any:
    """``create_splat``, which gives a truth value the type of one."""
    if number.data.dtype == bool and number.dtype.scalar != tl.int1:
        number = _interpreter.TensorHandle(number.data, tl.int1)
    return _create_splat(self, type_, number)


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """``_patch_lang_tensor``, after which a tensor of one number is one."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
