"""Checks of arguments: each raises TypeError or ValueError with the argument, what came and what is accepted.

None of them reads a device tensor's values, so none synchronises.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch._subclasses import FakeTensor

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Kernels compute in it, and GPUs may take what is below the smallest normal number for 0.
_FLOAT32 = torch.finfo(torch.float32)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def either(values: Iterable[object]) -> str:
    """ "a, b or c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    unit_last_stride: bool = True,
    may_be_empty: int = 0,
) -> torch.Tensor:
    """Check that ``value`` is a tensor of this shape, one of these dtypes and on this device.

    ``shape`` holds an int where the size is required and a name where it is free: at least 1, but for the first
    ``may_be_empty`` axes.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {value.layout}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {dtype_names(dtypes)}, got {dtype_names([value.dtype])}")
    if not _has_shape(value.shape, shape, may_be_empty):
        wanted = ", ".join(map(str, shape))
        empty = f"no empty axis but the first {may_be_empty}" if may_be_empty else "no empty axis"
        raise ValueError(f"{name} must have shape [{wanted}] with {empty}, got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {value.device}")
    if unit_last_stride and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} must have last stride 1, got strides {value.stride()}")
    return value


def agree_in_dtype(name: str, value: object, q: torch.Tensor, *others: torch.dtype) -> None:
    """Check that keys have q's dtype or one of ``others``. Which of both is wrong is not known."""
    if isinstance(value, torch.Tensor) and value.dtype not in (q.dtype, *others):
        exception = f", or {name} {dtype_names(others)}" if others else ""
        got = f"q in {dtype_names([q.dtype])} and {name} in {dtype_names([value.dtype])}"
        raise TypeError(f"q and {name} must agree in dtype{exception}, got {got}")


def output(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    unit_last_stride: bool = True,
    may_be_empty: int = 0,
) -> torch.Tensor:
    """``tensor`` for what a call writes into, whose elements must each have a place of their own."""
    value = tensor(name, value, shape, dtypes, device, unit_last_stride=unit_last_stride, may_be_empty=may_be_empty)
    not_expanded(name, value)
    return value


def given(name: str, value: object) -> torch.Tensor:
    """A tensor, where None would mean one that is made: for interfaces that return nothing but write into theirs."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def apart(name: str, value: torch.Tensor, **others: torch.Tensor | None) -> None:
    """What is written into does not begin where something that is read does."""
    if torch.compiler.is_compiling() or value.numel() == 0:
        return
    address = _address(value)
    for other_name, other in others.items():
        if other is not None and other.device == value.device and _address(other) == address != 0:
            raise ValueError(f"{name} must share no memory with {other_name} (both begin at one address)")


def has_values(x: torch.Tensor) -> bool:
    """Whether the host can read a tensor's values now: it is on the CPU, not fake, and no part of a traced program."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and (x.numel() == 0 or _address(x) != 0)


def has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has elements, and these have values: not one of a fake or meta tensor."""
    return x.numel() > 0 and _address(x) != 0


def _address(x: torch.Tensor) -> int:
    """Where x begins; 0 for a tensor without memory, as a fake one."""
    if isinstance(x, FakeTensor):
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def not_expanded(name: str, value: torch.Tensor) -> None:
    """What is written into has no two elements in one place."""
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        raise ValueError(f"{name} must not be an expanded tensor, got strides {value.stride()}")


def _has_shape(actual: torch.Size, wanted: Sequence[int | str], may_be_empty: int) -> bool:
    if len(actual) != len(wanted):
        return False
    for axis, (got, want) in enumerate(zip(actual, wanted, strict=True)):
        if got != want and (not isinstance(want, str) or (got < 1 and axis >= may_be_empty)):
            return False
    return True


def rows_aligned(x: torch.Tensor, alignment: int = 16) -> bool:
    """Whether all rows (along the last axis) begin at multiples of ``alignment`` bytes."""
    itemsize = x.element_size()
    return begins_at_multiple(x, alignment) and all(
        size == 1 or (stride > 0 and stride * itemsize % alignment == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def begins_at_multiple(x: torch.Tensor, alignment: int) -> bool:
    """Whether a tensor begins at a multiple of ``alignment`` bytes.

    torch.compile traces neither addresses nor storage offsets. There the answer is True, and launches check again.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return (_address(x) or x.storage_offset() * x.element_size()) % alignment == 0


def begins_aligned(backend: str, **tensors: torch.Tensor) -> None:
    """Check in a launch what ``rows_aligned`` cannot see under torch.compile."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes for {backend=}, got {tensor.data_ptr():#x}")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int, NumPy's and PyTorch's symbolic ones too, and no truth value."""
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def integer(name: str, value: object) -> int:
    """An int. What stands for one while PyTorch traces sizes that it does not know stays what it is."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not isinstance(value, (int, torch.SymInt)):
        value = int(value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit 64 bits, got {value}")
    return value


def positive_int(name: str, value: object, *, or_zero: bool = False) -> int:
    value = integer(name, value)
    least = 0 if or_zero else 1
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float holds, got {value}") from None


def positive_number(name: str, value: object) -> float:
    result = number(name, value)
    if not 0 < result < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")
    return result


def float32_factor(name: str, value: object) -> float:
    """A number above 0 that stays one in kernels: times a factor of 0 or inf, scores of 0 and -inf would be NaN."""
    result = positive_number(name, value)
    if not _FLOAT32.tiny <= result <= _FLOAT32.max:
        raise ValueError(f"{name} must be a number that float32 holds, got {value}")
    return result


def finite(name: str, value: object) -> float:
    result = number(name, value)
    if not -math.inf < result < math.inf:
        raise ValueError(f"{name} must be a finite number, got {value}")
    return result


def epsilon(name: str, value: object) -> float:
    """What is added to a mean square before its root: NaN or less than 0 would be NaN in every number."""
    eps = number(name, value)
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    return eps


def softmax_scale(value: float | None, head_dim: int, name: str = "softmax_scale") -> float:
    """The given scale, or head_dim^-0.5. Zero and below are refused: the running maximum is kept unscaled."""
    return head_dim**-0.5 if value is None else float32_factor(name, value)


def empty_lse(value: float) -> float:
    """The lse given to rows that see no key: one of the two infinities."""
    if number("empty_lse", value) not in (math.inf, -math.inf):
        raise ValueError(f"empty_lse must be float('inf') or float('-inf'), got {value}")
    return float(value)


def device(name: str, value: object) -> torch.device | None:
    """The device that a name, a number or a ``torch.device`` stands for, if there is one; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"{name} must be a torch.device or its name, got {type(value).__name__}")
    try:
        place = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} must be a device that PyTorch knows, as 'cpu' or 'cuda:0', got {value!r}") from error
    try:
        # Also where tensors are fake, which have any device.
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} must be a device that is there, got {value!r}: {reason}") from error
    return place


def instance(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    if not isinstance(value, kind) and not (or_none and value is None):
        raise TypeError(f"{name} must be of type {kind.__name__}{' or None' * or_none}, got {type(value).__name__}")


def choice(name: str, value: object, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")


class naming:
    """Errors raised within call arguments by other names: keys are the checks' names, values those of an interface.

    Messages hold an argument's name as a word of its own.
    """

    def __init__(self, **names: str) -> None:
        self.names = names

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and type(error) in (TypeError, ValueError):
            error.args = (" ".join(self.names.get(word, word) for word in str(error).split(" ")),)
