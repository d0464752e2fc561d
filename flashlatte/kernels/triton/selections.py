"""The keys that query tokens select, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64
from flashlatte.runtime.strides import first_stride


class TokenSelections(NamedTuple):
    """The list of indices that each query token, or each group of tokens, selects.

    Attributes:
        indices: [lists, 1, topk], keys from 0 to s_kv - 1; other values select nothing.
        lengths: [lists], the number of indices of a list that are used; None: all.
    """

    indices: ElementPointer
    stride: Int64
    lengths: ElementPointer
    length_stride: Int64
    s_kv: Int32
    topk: Int32


def selections_of(indices: torch.Tensor, lengths: torch.Tensor | None, s_kv: int) -> TokenSelections:
    return TokenSelections(indices, indices.stride(0), lengths, first_stride(lengths), s_kv, indices.shape[-1])


@triton.jit
def first_index(selections, number):
    """Pointer to the first index of a list."""
    return selections.indices + number.to(tl.int64) * selections.stride


@triton.jit
def selected_count(selections, number, topk):
    """How many of the first ``topk`` indices of a list are used."""
    count = topk
    if selections.lengths is not None:
        length = tl.load(selections.lengths + number.to(tl.int64) * selections.length_stride)
        count = tl.minimum(tl.maximum(length, 0), topk).to(tl.int32)
    return count
