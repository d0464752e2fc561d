"""What FlashInfer's functions have in common: base-2 lse, parts of rows in two tensors, names of backends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.runtime import checks

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
OWN_BACKENDS = ("hopper", "portable", "reference")


def own_backend(backend: object, theirs: Sequence[str]) -> str | None:
    """FlashLatte's backend of this name, or None for one of FlashInfer's."""
    checks.choice("backend", backend, (*theirs, *OWN_BACKENDS))
    return str(backend) if backend in OWN_BACKENDS else None


def refuse(reason: str, **arguments: object) -> None:
    """Raise an error about the first argument that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            got = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name} must be left out, got {got}: {reason}")


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The view [..., a + b] whose columns are first [..., a] and second [..., b]; None if they are not adjacent."""
    width, added = first.shape[-1], second.shape[-1]
    if added == 0:
        return first
    strides = first.stride()
    if first.numel() and not (
        second.data_ptr() - first.data_ptr() == width * first.element_size()
        and (strides == second.stride() or _strides_in_use(first) == _strides_in_use(second))
        and strides[-1] == 1
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    ):
        return None
    return first.as_strided((*first.shape[:-1], width + added), strides)


def _strides_in_use(x: torch.Tensor) -> list[int]:
    """Strides of the axes before the last whose size is above 1; others are arbitrary."""
    return [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]


def rows_of(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """x[rows], or x itself: a view takes longer."""
    return x if rows.start == 0 and rows.stop == x.shape[0] else x[rows]


def joined_cache(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor:
    """The cache [pages, page_size, 1, ckv + kpe] of its two parts [pages, page_size, ckv] and [pages, page_size, kpe].

    Raises ValueError if the parts are in two buffers: no kernel reads those, and a copy would take longer than decode.
    """
    rows = joined(ckv_cache, kpe_cache)
    if rows is None:
        width, added = ckv_cache.shape[-1], kpe_cache.shape[-1]
        raise ValueError(
            f"ckv_cache and kpe_cache must be adjacent columns of one tensor: allocate cache [pages, page_size, "
            f"{width + added}], and pass cache[..., :{width}] and cache[..., {width}:]; got strides "
            f"{ckv_cache.stride()} and {kpe_cache.stride()}, and addresses that differ by "
            f"{kpe_cache.data_ptr() - ckv_cache.data_ptr()} bytes"
        )
    return rows.unsqueeze(2)
