"""The arguments and results of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class IndexerLossParams(NamedTuple):
    """The checked arguments of ``api.indexer_loss``.

    Attributes:
        group: the name of a process group, or None.
        with_gradient: whether gradients are computed.
    """

    index_q: torch.Tensor
    index_k: torch.Tensor
    index_weights: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    lse: torch.Tensor | None
    indices: torch.Tensor | None
    topk_length: torch.Tensor | None
    key_start: torch.Tensor | None
    key_end: torch.Tensor | None
    softmax_scale: float
    index_scale: float
    use_relu: bool
    deterministic: bool
    group: str | None
    with_gradient: bool


class IndexerLossResults(NamedTuple):
    """The sum of the loss, its number of rows, and the gradients of the sum, contiguous; these are not written unless
    ``with_gradient``. Those of index_k and index_weights are in float32, or float64 for float64."""

    loss: torch.Tensor
    num_rows: torch.Tensor
    d_index_q: torch.Tensor
    d_index_k: torch.Tensor
    d_index_weights: torch.Tensor
