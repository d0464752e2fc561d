"""MLA's absorbed form: kv_b_proj folded into the query and applied to the output, so that keys stay latent.

With W_UK and W_UV the two parts of a head's kv_b_proj, q · (W_UK c) = (W_UKᵀ q) · c and Σ p (W_UV c) = W_UV Σ p c
(DeepSeek-V2, arXiv:2405.04434, §2.1.2).
"""

from __future__ import annotations

import torch


def fold_query(q_nope: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """Queries [b, s, h, nope] as queries over the latent, [b, s, h, latent].

    ``kv_b`` is kv_b_proj's weight seen as [h, nope + v, latent].
    """
    return torch.einsum("bshn,hnl->bshl", q_nope, kv_b[:, : q_nope.shape[-1]])


def unfold_value(latent: torch.Tensor, kv_b: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """Attention over latents [b, s, h, latent] as values [b, s, h, v_head_dim]; ``kv_b`` as in ``fold_query``."""
    return torch.einsum("bshl,hvl->bshv", latent, kv_b[:, -v_head_dim:])
