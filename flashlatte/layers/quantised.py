"""Linear layers of quantised weights, as the matrix that they stand for."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Of the largest number: what a product may change that rounds its input by that input's own size.
_ROUNDING = 0.02


class _Made(NamedTuple):
    """A layer's matrix in ``dtype``, and what it was made of: its tensors, and their places and versions then.

    Attributes:
        storages: theirs, which may be gone by now: no other gets the number of one that is remembered.
    """

    tensors: list[torch.Tensor]
    state: list[tuple[int, int, int]]
    storages: list[StorageWeakRef]
    dtype: torch.dtype
    matrix: torch.Tensor


_made: weakref.WeakKeyDictionary[nn.Module, _Made] = weakref.WeakKeyDictionary()


def is_quantised(module: Any, weight: torch.Tensor) -> bool:
    """Whether a linear layer's weight is in bytes that its class knows to read (bitsandbytes, transformers'
    ``FP8Linear``), or a tensor that knows it (torchao).
    """
    of_class = isinstance(module, nn.Linear) and type(module) is not nn.Linear
    return knows_itself(weight) or (of_class and weight.dtype.itemsize == 1)


def matrix_of(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, inputs] of a quantised linear layer without bias, in ``dtype``.

    It is made when first asked for, and again when one of the layer's tensors changed. What is changed behind PyTorch's
    back (``weight.data.copy_``) is not seen, nor what is changed in a tensor that was made in inference mode.

    Raises:
        TypeError: a call of the layer is not one product.
    """
    if torch.compiler.is_compiling():
        return _dequantised(module, dtype)
    tensors = [*_with_parts((*module.parameters(), *module.buffers()))]
    state = [_state(tensor) for tensor in tensors]
    known = _made.get(module)
    if (
        known is not None
        and (known.dtype, known.state) == (dtype, state)
        and all(map(operator.is_, known.tensors, tensors))
    ):
        return known.matrix
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if not _has_parts(tensor)]
    matrix = _dequantised(module, dtype).contiguous()
    _made[module] = _Made(tensors, state, storages, dtype, matrix)
    return matrix


def times_scales(
    weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int], first: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """A weight [m, n], or a part of one, times the scale of each of its blocks: float32.

    Args:
        scales: [⌈m / block[0]⌉, ⌈n / block[1]⌉] of the whole weight, or one of no dimension for all.
        first: where the part begins.
    """
    each = scales.float()
    if each.dim():
        rows, columns = (
            torch.arange(begin, begin + size, device=scales.device) // numbers
            for begin, size, numbers in zip(first, weight.shape, block, strict=True)
        )
        each = each[rows[:, None], columns]
    return weight.float() * each


@torch.no_grad()
def _dequantised(module: Any, dtype: torch.dtype) -> torch.Tensor:
    weight, scales = module.weight, getattr(module, "weight_scale_inv", None)
    if knows_itself(weight):
        try:
            matrix = weight.dequantize().to(dtype)
        except NotImplementedError:
            return _of_calls(module, dtype)
        # What torchao's AWQ and SmoothQuant multiply the layer's input by.
        before = getattr(weight, "act_pre_scale", None)
        return matrix if before is None else matrix * before.to(dtype)
    if scales is not None:
        return times_scales(weight, scales, module.block_size or weight.shape).to(dtype)
    # FP8Linear's kernels would give the zeros of an identity matrix a scale of 0.
    return _of_calls(module, dtype)


def _of_calls(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """What a layer makes of an identity matrix."""
    identity = torch.eye(module.in_features, dtype=dtype, device=module.weight.device)
    columns = module(identity)
    if columns.shape != (module.in_features, module.out_features):
        raise TypeError(f"a quantised {type(module).__name__} must be one product, got a result of {columns.shape}")
    if not (torch.compiler.is_compiling() or columns.is_meta):
        difference = (columns - 4 * module(identity / 4)).abs().amax()
        if not difference <= _ROUNDING * columns.abs().amax():
            raise TypeError(
                f"a quantised {type(module).__name__} must be one product, got one that rounds or clips its input by "
                "a scale of its own: load it dequantised"
            )
    return columns.T


def knows_itself(weight: torch.Tensor) -> bool:
    """Whether a tensor is made of others by a way of quantising that it knows."""
    # A DTensor is a part of one, of numbers.
    return _has_parts(weight) and "torch.distributed" not in type(weight).__module__


def _has_parts(tensor: torch.Tensor) -> bool:
    """Whether its numbers are those of other tensors, which it is made of."""
    return is_traceable_wrapper_subclass(tensor)


def _with_parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        if _has_parts(tensor):
            names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from _with_parts(getattr(tensor, name) for name in names)


def _state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Its storage, its place there and its version. What has parts has no place."""
    storage, place = (0, 0) if _has_parts(tensor) else (tensor.untyped_storage()._cdata, tensor.data_ptr())
    return storage, place, 0 if tensor.is_inference() else tensor._version
