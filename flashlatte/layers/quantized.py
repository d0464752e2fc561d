"""Dequantized weights of quantized linear layers."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Tolerance, relative to the largest element, for a product that quantizes its input with a dynamic scale.
_MAX_ROUNDING = 0.02


class _CachedWeight(NamedTuple):
    """A layer's weight in ``dtype``, with the tensors it was computed from and their state at that time.

    Attributes:
        storages: weak references to their storages, so that no new storage reuses the id of a remembered one.
    """

    tensors: list[torch.Tensor]
    state: list[tuple[int, int, int]]
    storages: list[StorageWeakRef]
    dtype: torch.dtype
    matrix: torch.Tensor


_cache: weakref.WeakKeyDictionary[nn.Module, _CachedWeight] = weakref.WeakKeyDictionary()


def is_quantized(module: Any, weight: torch.Tensor) -> bool:
    """Whether a linear layer is quantized: by its class (bitsandbytes, transformers' ``FP8Linear``), or by a tensor
    subclass of its weight (torchao).
    """
    of_class = isinstance(module, nn.Linear) and type(module) is not nn.Linear
    return is_quantized_tensor(weight) or (of_class and weight.dtype.itemsize == 1)


def dequantized_weight(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, inputs] of a quantized linear layer without bias, in ``dtype``.

    The result is cached until one of the layer's tensors changes. Changes that do not increase a tensor's version
    (``weight.data.copy_``, inference tensors) are not detected. The call that computes it waits for the GPU, so that
    threads may read the cached result on other streams.

    Raises:
        TypeError: the layer is not a linear map.
    """
    if torch.compiler.is_compiling():
        return _dequantized(module, dtype)
    tensors = [*_flatten((*module.parameters(), *module.buffers()))]
    state = [_state(tensor) for tensor in tensors]
    cached = _cache.get(module)
    if (
        cached is not None
        and (cached.dtype, cached.state) == (dtype, state)
        and all(map(operator.is_, cached.tensors, tensors))
    ):
        return cached.matrix
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if not _is_wrapper(tensor)]
    matrix = _dequantized(module, dtype).contiguous()
    if matrix.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return matrix  # its values exist only in replays
        torch.cuda.current_stream(matrix.device).synchronize()
    _cache[module] = _CachedWeight(tensors, state, storages, dtype, matrix)
    return matrix


def apply_block_scales(
    weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int], first: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """A weight [m, n], or a slice of one, times the scales of its blocks, in float32.

    Args:
        scales: [⌈m / block[0]⌉, ⌈n / block[1]⌉] of the whole weight, or a scalar.
        first: row and column of the whole weight at which the slice begins.
    """
    per_element = scales.float()
    if per_element.dim():
        rows, columns = (
            torch.arange(begin, begin + size, device=scales.device) // block_size
            for begin, size, block_size in zip(first, weight.shape, block, strict=True)
        )
        per_element = per_element[rows[:, None], columns]
    return weight.float() * per_element


@torch.no_grad()
def _dequantized(module: Any, dtype: torch.dtype) -> torch.Tensor:
    weight, scales = module.weight, getattr(module, "weight_scale_inv", None)
    if is_quantized_tensor(weight):
        try:
            matrix = weight.dequantize().to(dtype)
        except NotImplementedError:
            return _weight_from_calls(module, dtype)
        # torchao's AWQ and SmoothQuant multiply the layer's input by it.
        before = getattr(weight, "act_pre_scale", None)
        return matrix if before is None else matrix * before.to(dtype)
    if scales is not None:
        # A call of FP8Linear on an identity matrix would compute input scales of 0 for zero blocks.
        return apply_block_scales(weight, scales, module.block_size or weight.shape).to(dtype)
    return _weight_from_calls(module, dtype)


def _weight_from_calls(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight, as the layer's result for an identity matrix."""
    identity = torch.eye(module.in_features, dtype=dtype, device=module.weight.device)
    columns = module(identity)
    if columns.shape != (module.in_features, module.out_features):
        raise TypeError(f"a quantized {type(module).__name__} must be a linear map, got a result of {columns.shape}")
    if not (torch.compiler.is_compiling() or columns.is_meta):
        difference = (columns - 4 * module(identity / 4)).abs().amax()
        if not difference <= _MAX_ROUNDING * columns.abs().amax():
            raise TypeError(
                f"a quantized {type(module).__name__} must be a linear map, got one that quantizes its input with a "
                "static scale: load it dequantized"
            )
    return columns.T


def is_quantized_tensor(weight: torch.Tensor) -> bool:
    """Whether a tensor is a quantized tensor subclass."""
    # A DTensor is a wrapper too, but not quantized.
    return _is_wrapper(weight) and "torch.distributed" not in type(weight).__module__


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor subclass that wraps other tensors."""
    return is_traceable_wrapper_subclass(tensor)


def _flatten(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        if _is_wrapper(tensor):
            names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from _flatten(getattr(tensor, name) for name in names)


def _state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, address and version of a tensor; a wrapper has neither storage nor address."""
    storage, address = (0, 0) if _is_wrapper(tensor) else (tensor.untyped_storage()._cdata, tensor.data_ptr())
    return storage, address, 0 if tensor.is_inference() else tensor._version
