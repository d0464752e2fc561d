"""MLA's absorbed form: kv_b_proj folded into the query and applied to the output, so that keys stay latent.

With W_UK and W_UV the two parts of a head's kv_b_proj, q · (W_UK c) = (W_UKᵀ q) · c and Σ p (W_UV c) = W_UV Σ p c
(DeepSeek-V2, arXiv:2405.04434, §2.1.2).
"""

from __future__ import annotations

import torch

from flashlatte.layers.products import bmm_into

# Longer steps are prefill: the decode kernels are made for few queries, and over a history the multi-head form is
# the cheaper one from kv_lora_rank * (nope + v) / (2 * kv_lora_rank - nope - v) = 170 queries on (DeepSeek-V3).
MAX_ABSORBED_QUERIES = 16


def up_projections(kv_b: torch.Tensor, nope_dim: int, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [h, nope, latent] and W_UV [h, v, latent] as views of kv_b_proj's weight [h · (nope + v), latent]."""
    per_head = kv_b.unflatten(0, (-1, nope_dim + v_dim))
    return per_head[:, :nope_dim], per_head[:, nope_dim:]


def fold_query(q_nope: torch.Tensor, w_uk: torch.Tensor, out: torch.Tensor) -> None:
    """Queries [T, h, nope] as queries over the latent, into ``out`` [T, h, latent], which may be a part of rows."""
    bmm_into(q_nope.transpose(0, 1), w_uk, out.transpose(0, 1))


def unfold_value(latent: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> None:
    """Attention over latents [T, h, latent] as values, into ``out`` [T, h, v]."""
    bmm_into(latent.transpose(0, 1), w_uv.transpose(1, 2), out.transpose(0, 1))
