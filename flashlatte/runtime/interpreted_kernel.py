"""Kernels in Triton's interpreter, whose integer arguments have the annotated type, and repairs of the interpreter."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from flashlatte.runtime.kernel_records import flat_records

# The interpreter patches ``triton.language`` during a launch, and has one program index.
_lock = threading.RLock()


class InterpretedKernel:
    """Passes each ``tl.int64`` parameter as an int64, and launches in one thread at a time.

    The interpreter ignores the annotation and converts an int that fits to int32. The product of an int32 index and a
    stride then wraps at 2^31, whereas the compiled kernel computes in 64 bits. This class assumes that the interpreter
    leaves arguments unchanged that are not Python numbers, tensors or tuples.

    Attributes:
        jitted: Triton's ``InterpretedFunction``.
        records, same: the record class of each of the first parameters that is a record; as in ``kernel``.
    """

    def __init__(self, jitted: Any, records: Mapping[str, type[Any]], same: Mapping[str, str]) -> None:
        self.jitted = jitted
        self.records, self.same = records, same
        parameters = inspect.signature(jitted.fn).parameters
        self._positions = list(parameters)
        self._wide = {name for name, item in parameters.items() if str(item.annotation).rpartition(".")[2] == "int64"}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            named = dict(zip(self._positions, flat_records(self.records, self.same, args), strict=False)) | kwargs
            typed = {name: _int64(value) if name in self._wide else value for name, value in named.items()}
            with _lock:
                self.jitted[grid](**typed)

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _int64(value: Any) -> Any:
    if not isinstance(value, int):
        return value
    return tl.tensor(TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64)


def _repair() -> None:
    """Repair two defects of Triton's interpreter, for all kernels of the process.

    A comparison of two scalars has their type instead of int1, so that its splat is a block of numbers: Triton 3.9
    rejects it as a mask, and all versions reject it as an operand of ``|`` beside a block. And Triton 3.6 counts loops
    with an array of one element, which NumPy 2.4 does not convert to an int.
    """
    builder: Any = interpreter.InterpreterBuilder
    module: Any = interpreter
    splat, patch_tensor = builder.create_splat, module._patch_lang_tensor

    def create_splat(self: Any, type_: Any, number: Any) -> Any:
        if number.data.dtype == bool and number.dtype.scalar != tl.int1:
            number = TensorHandle(number.data, tl.int1)
        return splat(self, type_, number)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    builder.create_splat = create_splat
    module._patch_lang_tensor = patch_lang_tensor


# Only an interpreting process imports this module.
_repair()
