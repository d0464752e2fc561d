"""Matrix products of layers, and projections of the same rows fused into one product by adjacent weights.

With few rows, a product takes as long as reading its weights, and a small one does not fill a GPU. The seven
projections of a DeepSeek-V4 layer take 34 µs longer than one product with as many columns (docs/notes/layer.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flashlatte.layers.weights import has_custom_call
from flashlatte.runtime import checks


def linear(
    inputs: int, outputs: int, dtype: torch.dtype | None, device: torch.device | str | None, *, bias: bool = False
) -> nn.Linear:
    """A linear layer with uninitialized parameters, on the CPU if ``device`` is None."""
    layer: Any = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=device or "cpu")
    return layer


def bmm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write a [n, T, k] · b [n, k, m] into ``out`` [n, T, m], which may be a transposed view."""
    if torch.compiler.is_compiling():
        # torch.compile requires a contiguous out=, and fuses the copy.
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def fused_linear(hidden: torch.Tensor, *projections: Any) -> list[torch.Tensor]:
    """The result of each of ``projections`` for ``hidden`` [T, inputs], in the dtype of its weight.

    Projections with adjacent weights (``fuse_weights``) are computed as one product, and their results are views of
    it. All others are called, as are projections that have hooks, are wrapped, or are not plain linear layers.
    """
    results: list[torch.Tensor] = []
    for run in _runs(projections):
        # A replacement of a linear layer may have no weight, or a packed one.
        weight = getattr(run[0], "weight", None)
        dtype = getattr(weight, "dtype", None)
        rows = hidden.to(dtype) if dtype in checks.FLOAT_DTYPES else hidden
        if weight is None or len(run) == 1:
            results.append(run[0](rows))
        else:
            sizes = [projection.weight.shape[0] for projection in run]
            fused = weight.as_strided((sum(sizes), weight.shape[1]), weight.stride())
            results += functional.linear(rows, fused).split(sizes, dim=-1)
    return results


# Two threads may create engines of one model. Weights that one has moved, which its graphs read, must not move again.
_fusing = threading.Lock()


@torch.no_grad()
def fuse_weights(*projections: Any) -> None:
    """Move the weights [n, inputs] of linear layers into one tensor [Σ n, inputs]; each weight becomes a view of it.

    Parameters keep their identity and values, and the tensors of a state dict have separate storages. Layers with a
    bias or hooks are skipped, as are weights that are views already; the layers after a skipped one form a new tensor.
    """
    run: list[nn.Linear] = []
    with _fusing:
        for projection in projections:
            weight = plain_weight(projection)
            if weight is not None and not _owns_storage(weight):
                weight = None
            if run and (weight is None or not _can_fuse(run[0].weight, weight)):
                _fuse(run)
                run = []
            if weight is not None:
                run.append(projection)
        _fuse(run)


def fuse_weights_on_gpu(layers: Iterable[Sequence[Any]]) -> None:
    """Call ``fuse_weights`` for the projections of each layer that are on a GPU.

    On a CPU the gain is small, and weights may be memory-mapped from a checkpoint.
    """
    moved = False
    for projections in layers:
        if all(getattr(projection, "weight", torch.empty(0)).is_cuda for projection in projections):
            fuse_weights(*projections)
            moved = True
    if moved:
        # The old weights leave fragments in the caching allocator.
        torch.cuda.empty_cache()


def _runs(projections: Sequence[Any]) -> list[list[Any]]:
    """Group consecutive projections whose weights are adjacent in memory."""
    runs: list[list[Any]] = []
    # torch.compile cannot trace data_ptr.
    compiling = torch.compiler.is_compiling()
    before: torch.Tensor | None = None
    for projection in projections:
        weight = None if compiling else plain_weight(projection)
        if before is not None and weight is not None and _is_adjacent(before, weight):
            runs[-1].append(projection)
        else:
            runs.append([projection])
        before = weight
    return runs


def plain_weight(projection: Any) -> torch.Tensor | None:
    """The weight of a linear layer without bias, hooks or a replaced forward; None for others."""
    if type(projection) is not nn.Linear or has_custom_call(projection):
        return None
    # Replicas (DataParallel) and shards (FSDP) do not keep the weight in _parameters.
    weight = projection._parameters.get("weight")
    if type(weight) is not nn.Parameter or projection.bias is not None or not weight.is_contiguous():
        return None
    # Gradients must reach each weight separately.
    return None if weight.requires_grad and torch.is_grad_enabled() else weight


def _is_adjacent(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the second weight begins where the first one ends, in the same storage.

    Adjacent tensors of different storages have the right addresses, but the second has storage offset 0.
    """
    return (
        second.storage_offset() == first.storage_offset() + first.numel()
        and second.data_ptr() == first.data_ptr() + first.nbytes
        and _can_fuse(first, second)
    )


def _can_fuse(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.device == second.device and first.shape[1] == second.shape[1]


def _owns_storage(weight: torch.Tensor) -> bool:
    """Whether the weight covers its storage: moving a view would leave the rest of the storage allocated."""
    return weight.is_meta or weight.untyped_storage().nbytes() == weight.nbytes


def _fuse(projections: Sequence[nn.Linear]) -> None:
    if len(projections) < 2:
        return
    weights = [projection.weight for projection in projections]
    sizes = [weight.shape[0] for weight in weights]
    fused = weights[0].new_empty(sum(sizes), weights[0].shape[1])
    for weight, part in zip(weights, fused.split(sizes), strict=True):
        part.copy_(weight)
        weight.data = part
    for projection in projections:
        if _detach_storage not in projection._state_dict_hooks.values():
            projection.register_state_dict_post_hook(_detach_storage)


def _detach_storage(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
    """Replace a state dict's weight by a tensor over the same memory with a storage of its own.

    Savers may reject views of a shared storage (``safetensors.torch.save_model``), or treat them as tied weights and
    keep only one.
    """
    weight = state.get(prefix + "weight")
    if type(weight) is torch.Tensor and not _owns_storage(weight):
        state[prefix + "weight"] = torch.from_dlpack(weight)
