"""Kernels in Triton's interpreter, whose integer arguments have the annotated type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from flashlatte.runtime.kernel_records import flat_records


class InterpretedKernel:
    """Passes each ``tl.int64`` parameter as an int64.

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
        launch = self.jitted[grid]

        def run(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(self._positions, flat_records(self.records, self.same, args), strict=False)) | kwargs
            return launch(**{name: _int64(value) if name in self._wide else value for name, value in named.items()})

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _int64(value: Any) -> Any:
    if not isinstance(value, int):
        return value
    return tl.tensor(TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64)
