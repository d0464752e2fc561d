"""The arguments of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SparsePrefillParams(NamedTuple):
    """The checked arguments of ``api.sparse_prefill``; ``max_logits`` and ``lse`` are contiguous. ``precision`` is
    None or "fp8"."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    softmax_scale: float
    empty_lse: float
    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor
    precision: str | None = None

    def of_tokens(self, tokens: slice) -> SparsePrefillParams:
        """The arguments of a part of the query tokens."""
        return self._replace(
            q=self.q[tokens],
            indices=self.indices[tokens],
            topk_length=None if self.topk_length is None else self.topk_length[tokens],
            out=self.out[tokens],
            max_logits=self.max_logits[tokens],
            lse=self.lse[tokens],
        )
