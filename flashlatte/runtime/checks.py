"""Argument checks: each raises TypeError or ValueError with the argument's name, its value and the accepted values.

No check reads the values of a device tensor, so none synchronizes.
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
# Kernels compute in float32, and GPUs may flush subnormal numbers to 0.
_FLOAT32 = torch.finfo(torch.float32)
# Kernels multiply factors of scores by log2(e), and divide ln(2) by them: neither result may leave normal float32.
_LARGEST_SCORE_FACTOR = 2.0**125


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def join_or(values: Iterable[object]) -> str:
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

    ``shape`` holds an int for a required size and a name for a free size of at least 1. The first ``may_be_empty`` axes
    may have size 0.
    """
    value = given(name, value)
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {dtype_names(dtypes)}, got {dtype_names([value.dtype])}")
    if not _has_shape(value.shape, shape, may_be_empty):
        wanted = ", ".join(map(str, shape))
        empty = f"no empty axis but the first {may_be_empty}" if may_be_empty else "no empty axis"
        raise ValueError(f"{name} must have shape [{wanted}] with {empty}, got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {value.device}")
    # Strides of a tensor without elements are arbitrary: NumPy's are 0.
    if unit_last_stride and value.shape[-1] > 1 and value.stride(-1) != 1 and value.numel() > 0:
        raise ValueError(f"{name} must have last stride 1, got strides {value.stride()}")
    return value


def indices(
    name: str, value: object, shape: Sequence[int | str], device: torch.device | None = None, *, may_be_empty: int = 0
) -> torch.Tensor:
    """``tensor`` for indices, positions or lengths: int32 or int64, with any strides."""
    return tensor(name, value, shape, INDEX_DTYPES, device, unit_last_stride=False, may_be_empty=may_be_empty)


def host_readable(**tensors: torch.Tensor) -> None:
    """Check that tensors have values to copy, unlike meta tensors."""
    for name, value in tensors.items():
        if value.is_meta:
            raise ValueError(f"{name} must have values, got a meta tensor")


def block_table(value: object, requests: int, device: torch.device) -> torch.Tensor:
    """Check a block table [requests, max_pages]. Without requests it may have no pages either."""
    may_be_empty = 0 if requests else 2
    return tensor("block_table", value, (requests, "max_pages"), INDEX_DTYPES, device, may_be_empty=may_be_empty)


def dtype(name: str, value: object, accepted: Sequence[torch.dtype]) -> None:
    """Check an argument that is itself a dtype."""
    if value not in accepted:
        raise TypeError(f"{name} must be {dtype_names(accepted)}, got {value}")


def same_dtype(name: str, value: object, q: torch.Tensor, *others: torch.dtype) -> None:
    """Check that ``value`` has q's dtype or one of ``others``. The message names both: either may be the wrong one."""
    if is_strided(value) and value.dtype not in (q.dtype, *others):
        exception = f", or {name} {dtype_names(others)}" if others else ""
        got = f"q in {dtype_names([q.dtype])} and {name} in {dtype_names([value.dtype])}"
        raise TypeError(f"q and {name} must agree in dtype{exception}, got {got}")


def query_width(q: torch.Tensor, q_rope: object) -> int:
    """Check the last columns of queries ``q``, if they are in another tensor. Returns the width of both."""
    if q_rope is None:
        return q.shape[-1]
    shape = (*q.shape[:-1], "rope")
    return q.shape[-1] + tensor("q_rope", q_rope, shape, (q.dtype,), q.device, may_be_empty=q.dim() - 2).shape[-1]


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
    """``tensor`` for a tensor that is ``writable``."""
    value = tensor(name, value, shape, dtypes, device, unit_last_stride=unit_last_stride, may_be_empty=may_be_empty)
    writable(name, value)
    return value


def output_or_new(
    name: str,
    value: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    zeros: bool = False,
    unit_last_stride: bool = True,
    **inputs: torch.Tensor | None,
) -> torch.Tensor:
    """A given output, checked by ``output`` and to begin at the address of none of ``inputs``; a new one if None.

    ``zeros``: fill a new one with zeros. Otherwise its values are undefined.
    """
    if value is None:
        return (torch.zeros if zeros else torch.empty)(tuple(shape), dtype=dtype, device=device)
    output(name, value, tuple(shape), (dtype,), device, unit_last_stride=unit_last_stride)
    no_overlap(name, value, **inputs)
    return value


def given(name: str, value: object) -> torch.Tensor:
    """Check that a value is a tensor that ``is_strided``, before its shape or strides are read."""
    if is_strided(value):
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    layout = "a nested tensor" if value.is_nested else f"layout {value.layout}"
    raise TypeError(f"{name} must be a strided tensor, got {layout}")


def is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with a shape and strides: neither sparse, nor nested, nor of another library."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def no_overlap(name: str, value: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that an output does not begin at the address of an input."""
    if torch.compiler.is_compiling() or value.numel() == 0:
        return
    address = _address(value)
    for other_name, other in others.items():
        if other is not None and other.device == value.device and _address(other) == address != 0:
            raise ValueError(f"{name} must share no memory with {other_name} (both begin at one address)")


def has_values(x: torch.Tensor) -> bool:
    """Whether the host can read a tensor's values now: it is on the CPU, not fake, and not traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and (x.numel() == 0 or _address(x) != 0)


def has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory, unlike a fake or meta tensor."""
    return x.numel() > 0 and _address(x) != 0


def _address(x: torch.Tensor) -> int:
    """The address of x; 0 for a tensor without memory, such as a fake tensor."""
    if isinstance(x, FakeTensor):
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def writable(name: str, value: torch.Tensor) -> None:
    """Check that a kernel can write to a tensor: no two elements share memory, and none is stored negated."""
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ValueError(f"{name} must not be a negated view, such as the imaginary part of a conjugate")
    expanded = any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))
    if expanded and value.numel() > 0:
        raise ValueError(f"{name} must not be an expanded tensor, got strides {value.stride()}")


def contiguous(**tensors: torch.Tensor) -> None:
    for name, value in tensors.items():
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(value.stride())}")


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

    Under torch.compile, which traces neither addresses nor storage offsets, the result is True; launches check again.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return (_address(x) or x.storage_offset() * x.element_size()) % alignment == 0


def begins_aligned(**tensors: torch.Tensor) -> None:
    """Check at a launch on Hopper the alignment that ``rows_aligned`` cannot check under torch.compile."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} must begin at a multiple of 16 bytes for backend='hopper', got {tensor.data_ptr():#x}"
            )


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int (also of NumPy, or symbolic) and not a bool."""
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def integer(name: str, value: object) -> int:
    """An int. A symbolic size of a traced program is returned unchanged."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not isinstance(value, (int, torch.SymInt)):
        value = int(value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit 64 bits, got {value}")
    return value


def positive_int(name: str, value: object, *, or_zero: bool = False, maximum: int | None = None) -> int:
    value = integer(name, value)
    minimum = 0 if or_zero else 1
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
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
        raise ValueError(f"{name} must be a number in the range of float, got {value}") from None


def positive_number(name: str, value: object) -> float:
    result = number(name, value)
    if not 0 < result < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")
    return result


def float32_factor(name: str, value: object) -> float:
    """A factor above 0 that is a normal float32: as 0 or inf it would turn scores of -inf or 0 into NaN."""
    result = positive_number(name, value)
    if not _FLOAT32.tiny <= result <= _FLOAT32.max:
        raise ValueError(f"{name} must be a number that is a normal float32, got {value}")
    return result


def finite(name: str, value: object) -> float:
    result = number(name, value)
    if not -math.inf < result < math.inf:
        raise ValueError(f"{name} must be a finite number, got {value}")
    return result


def score_factor(name: str, value: object) -> float:
    """A factor of attention scores: a normal float32 above 0 and at most 2^125."""
    result = float32_factor(name, value)
    if result > _LARGEST_SCORE_FACTOR:
        raise ValueError(f"{name} must be at most 2^125, got {value}")
    return result


def epsilon(name: str, value: object) -> float:
    """The epsilon of an RMS norm: at least 0 and finite as a float32, since others can make a row NaN or 0."""
    eps = number(name, value)
    if not 0 <= eps <= _FLOAT32.max:
        raise ValueError(f"{name} must be a finite number of at least 0 in float32, got {value}")
    return eps


def softmax_scale(value: float | None, head_dim: int, name: str = "softmax_scale") -> float:
    """The given scale, or head_dim^-0.5. It must be above 0, because kernels keep the running maximum unscaled."""
    return head_dim**-0.5 if value is None else score_factor(name, value)


def empty_lse(value: float) -> float:
    """The lse of rows without a visible key: +inf or -inf."""
    if number("empty_lse", value) not in (math.inf, -math.inf):
        raise ValueError(f"empty_lse must be float('inf') or float('-inf'), got {value}")
    return float(value)


def device(name: str, value: object) -> torch.device | None:
    """The device of a name, an index or a ``torch.device``, which must be present; None is returned unchanged."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"{name} must be a torch.device or its name, got {type(value).__name__}")
    try:
        result = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} must be a PyTorch device such as 'cpu' or 'cuda:0', got {value!r}") from error
    try:
        # Under FakeTensorMode this accepts every device.
        torch.empty(0, device=result)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} must be an available device, got {value!r}: {reason}") from error
    return result


def instance(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    if not isinstance(value, kind) and not (or_none and value is None):
        raise TypeError(f"{name} must be of type {kind.__name__}{' or None' * or_none}, got {type(value).__name__}")


def choice(name: str, value: object, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")


class naming:
    """Context manager that renames arguments in the messages of errors raised within.

    Keys are the names that the checks use, values those of an interface. In messages, a name is a separate word.
    """

    def __init__(self, **names: str) -> None:
        self.names = names

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and type(error) in (TypeError, ValueError):
            error.args = (" ".join(self.names.get(word, word) for word in str(error).split(" ")),)
