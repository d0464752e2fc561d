"""The arguments of implementations of the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SparseAttentionBackwardParams(NamedTuple):
    """Gradients of the results, and arguments and results of the forward pass. ``dout``, ``dlse``, ``out`` and ``lse``
    are contiguous."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    deterministic: bool


class SparseAttentionGradients(NamedTuple):
    """The gradients that an implementation writes, contiguous; ``d_sink`` is 0 without sinks."""

    dq: torch.Tensor
    dkv: torch.Tensor
    d_sink: torch.Tensor
