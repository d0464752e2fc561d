"""The softmax of the reference implementations."""

from __future__ import annotations

import torch


def attend(scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis where ``visible``. Returns (probabilities, lse), with lse in natural logarithm.

    Rows without a visible key have probabilities 0 and lse -inf.
    """
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    shift = torch.where(lse.isneginf(), 0.0, lse)
    return torch.exp(scores - shift.unsqueeze(-1)), lse


def sink_weight(lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """e^lse / (e^lse + e^sink), the factor by which an attention sink scales the output: 1 for a sink of -inf; 0 for
    +inf or without a visible key."""
    return torch.where(lse.isneginf(), 0.0, torch.sigmoid(lse - attn_sink))
