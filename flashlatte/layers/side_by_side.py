"""Several projections of the same rows as one matrix product, where their weights lie one after the other in memory.

With few rows a product takes as long as its weights take to be read, and small ones do not fill a GPU: the seven of a
DeepSeek-V4 layer take 34 µs longer than one of as many columns (docs/notes/layer.md, "Projections side by side").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flashlatte.layers.weights import is_watched
from flashlatte.runtime import checks


def products_of(hidden: torch.Tensor, *projections: Any) -> list[torch.Tensor]:
    """What each of ``projections`` makes of ``hidden`` [T, inputs], in the dtype of its weight.

    One product serves those whose weights lie one after the other (``lay_side_by_side``): their results are columns of
    its own. All others, and those that something watches, wraps or replaces, are called.
    """
    results: list[torch.Tensor] = []
    for run in _runs(projections):
        # What replaced a linear layer may have no weight, or one that it unpacks itself.
        weight = getattr(run[0], "weight", None)
        dtype = getattr(weight, "dtype", None)
        rows = hidden.to(dtype) if dtype in checks.FLOAT_DTYPES else hidden
        if weight is None or len(run) == 1:
            results.append(run[0](rows))
        else:
            sizes = [projection.weight.shape[0] for projection in run]
            joined = weight.as_strided((sum(sizes), weight.shape[1]), weight.stride())
            results += functional.linear(rows, joined).split(sizes, dim=-1)
    return results


@torch.no_grad()
def lay_side_by_side(*projections: Any) -> None:
    """Move the weights [n, inputs] of linear layers into one tensor [Σ n, inputs], of which each is then a part.

    Parameters stay the same objects, with the same values, and a state dict's tensors have storages of their own. A
    layer that is more than a product without bias stays where it is, as does one whose weight is a part of something
    already; the next one begins another tensor.
    """
    run: list[nn.Linear] = []
    for projection in projections:
        weight = plain_weight(projection)
        if weight is not None and not _is_whole(weight):
            weight = None
        if run and (weight is None or not _are_alike(run[0].weight, weight)):
            _join(run)
            run = []
        if weight is not None:
            run.append(projection)
    _join(run)


def lay_on_gpus(layers: Iterable[Sequence[Any]]) -> None:
    """``lay_side_by_side`` the projections of each layer of a model, if they are on a GPU.

    On a CPU there is less to win, and weights may be pages of a checkpoint's file.
    """
    moved = False
    for projections in layers:
        if all(getattr(projection, "weight", torch.empty(0)).is_cuda for projection in projections):
            lay_side_by_side(*projections)
            moved = True
    if moved:
        # What each weight lay in is free, in pieces that nothing else may fit.
        torch.cuda.empty_cache()


def _runs(projections: Sequence[Any]) -> list[list[Any]]:
    """Projections in order, those together whose weights lie one after the other."""
    runs: list[list[Any]] = []
    # torch.compile reads no addresses.
    compiling = torch.compiler.is_compiling()
    before: torch.Tensor | None = None
    for projection in projections:
        weight = None if compiling else plain_weight(projection)
        if before is not None and weight is not None and _adjoins(before, weight):
            runs[-1].append(projection)
        else:
            runs.append([projection])
        before = weight
    return runs


def plain_weight(projection: Any) -> torch.Tensor | None:
    """The weight of a linear layer whose call does no more than the product: no bias, hook or other forward."""
    if type(projection) is not nn.Linear or is_watched(projection):
        return None
    # Replicas (DataParallel) and shards (FSDP) have theirs elsewhere.
    weight = projection._parameters.get("weight")
    if type(weight) is not nn.Parameter or projection.bias is not None or not weight.is_contiguous():
        return None
    # Gradients go to each weight by itself.
    return None if weight.requires_grad and torch.is_grad_enabled() else weight


def _adjoins(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the second one begins where the first one ends, in the same storage: one that began there would do so at
    its own offset 0."""
    return (
        second.storage_offset() == first.storage_offset() + first.numel()
        and second.data_ptr() == first.data_ptr() + first.nbytes
        and _are_alike(first, second)
    )


def _are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.device == second.device and first.shape[1] == second.shape[1]


def _is_whole(weight: torch.Tensor) -> bool:
    """Whether it is all of what it lies in: other parts of that would stay behind."""
    return weight.is_meta or weight.untyped_storage().nbytes() == weight.nbytes


def _join(projections: Sequence[nn.Linear]) -> None:
    if len(projections) < 2:
        return
    weights = [projection.weight for projection in projections]
    sizes = [weight.shape[0] for weight in weights]
    joined = weights[0].new_empty(sum(sizes), weights[0].shape[1])
    for weight, part in zip(weights, joined.split(sizes), strict=True):
        part.copy_(weight)
        weight.data = part
    for projection in projections:
        if _with_own_storage not in projection._state_dict_hooks.values():
            projection.register_state_dict_post_hook(_with_own_storage)


def _with_own_storage(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
    """A state dict's weight as a tensor over the same memory that does not tell of its neighbours.

    Who saves a model may refuse parts of one storage (``safetensors.torch.save_model``), or take them for one weight of
    several names, and leave out all but the first.
    """
    weight = state.get(prefix + "weight")
    if type(weight) is torch.Tensor and not _is_whole(weight):
        state[prefix + "weight"] = torch.from_dlpack(weight)
