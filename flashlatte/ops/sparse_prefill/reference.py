"""Sparse prefill in plain PyTorch, a few query tokens at a time: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels import fp8_attention
from flashlatte.kernels.softmax import attend, sink_weight
from flashlatte.runtime import query_parts

GATHERED_BYTES = 64 * 2**20


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
    q_rope: torch.Tensor | None = None

    @property
    def head_dim(self) -> int:
        """The width of the queries, of both parts if there are two."""
        return query_parts.width(self.q, self.q_rope)

    def with_joined_queries(self) -> SparsePrefillParams:
        """The arguments with both parts of the queries in one tensor."""
        return self._replace(q=query_parts.join(self.q, self.q_rope), q_rope=None)

    def of_tokens(self, tokens: slice) -> SparsePrefillParams:
        """The arguments of a part of the query tokens."""
        return self._replace(
            q=self.q[tokens],
            q_rope=None if self.q_rope is None else self.q_rope[tokens],
            indices=self.indices[tokens],
            topk_length=None if self.topk_length is None else self.topk_length[tokens],
            out=self.out[tokens],
            max_logits=self.max_logits[tokens],
            lse=self.lse[tokens],
        )


@torch.no_grad()
def sparse_prefill(params: SparsePrefillParams) -> None:
    q, kv, indices, out = query_parts.join(params.q, params.q_rope), params.kv, params.indices, params.out
    if params.precision is not None:
        kv = fp8_attention.quantize_keys(kv)
    s_q, _, topk = indices.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(topk, device=q.device)
    chunk = max(1, GATHERED_BYTES // (topk * q.shape[-1] * 4))

    for begin in range(0, s_q, chunk):
        tokens = slice(begin, min(begin + chunk, s_q))
        selected = indices[tokens, 0].long()  # [tokens, topk]
        visible = (selected >= 0) & (selected < kv.shape[0])
        if params.topk_length is not None:
            visible &= position < params.topk_length[tokens, None]
        keys = kv[torch.where(visible, selected, 0), 0].to(wide)  # [tokens, topk, d]
        keys = torch.where(visible.unsqueeze(-1), keys, 0.0)

        queries = q[tokens].to(wide)
        if params.precision is not None:
            queries = fp8_attention.quantize_queries(queries, out.shape[-1])
        scores = torch.einsum("shd,snd->shn", queries, keys) * params.softmax_scale
        p, row_lse = attend(scores, visible[:, None, :])
        if params.precision is not None:
            p = fp8_attention.round_probabilities(p)
        values = torch.einsum("shn,snd->shd", p, keys[..., : out.shape[-1]])
        if params.attn_sink is not None:
            values = values * sink_weight(row_lse, params.attn_sink).unsqueeze(-1)

        out[tokens] = values.to(out.dtype)
        params.max_logits[tokens] = scores.masked_fill(~visible[:, None, :], float("-inf")).amax(dim=-1)
        params.lse[tokens] = torch.where(row_lse.isneginf(), params.empty_lse, row_lse)
