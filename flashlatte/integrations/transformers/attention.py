"""DeepSeek-V3's attention over a paged latent cache. Importing this module imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as host

from flashlatte.integrations.transformers.absorbed import fold_query, unfold_value
from flashlatte.integrations.transformers.cache import PagedLatentCache
from flashlatte.integrations.transformers.paged_latents import PagedLatents


class PagedLatentAttention(host.DeepseekV3Attention):
    """``DeepseekV3Attention`` whose history may be a ``PagedLatentCache``; with any other, or none, it is the original.

    It adds no state: an instance is a ``DeepseekV3Attention`` whose class was changed, and changes back.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        if not isinstance(past_key_values, PagedLatentCache):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
            )
        latents = past_key_values.latents
        q_nope, q_rope, latent, k_rope = project(self, hidden_states, position_embeddings)
        rows = torch.cat((latent, k_rope), dim=-1)
        latents.write(self.layer_idx, rows)
        if latents.absorbs:
            out = absorbed_attention(self, q_nope, q_rope, latents)
        else:
            if latents.columns:
                rows = torch.cat((latents.read_history(self.layer_idx), rows), dim=1)
            query = torch.cat((q_nope, q_rope), dim=-1)
            out = multi_head_attention(self, query, rows, attention_mask, **kwargs)
        return self.o_proj(out.flatten(2)), None


def project(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_nope [b, s, h, nope], q_rope [b, s, h, rope], latent [b, s, kv_lora_rank] and k_rope [b, s, rope]."""
    if module.q_lora_rank is None:
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    q = q.unflatten(-1, (-1, module.qk_head_dim))
    q_nope, q_rope = q.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    latent, k_rope = module.kv_a_proj_with_mqa(hidden_states).split(
        (module.kv_lora_rank, module.qk_rope_head_dim), dim=-1
    )
    interleaved = module.config.rope_interleave
    rotate = host.apply_rotary_pos_emb_interleave if interleaved else host.apply_rotary_pos_emb
    q_rope, k_rope = rotate(q_rope, k_rope.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
    return q_nope, q_rope, module.kv_a_layernorm(latent), k_rope.squeeze(2)


def absorbed_attention(module: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, latents: PagedLatents) -> torch.Tensor:
    """Attention in absorbed form over the stored tokens: [b, s_q, h, v_head_dim].

    kv_b_proj's weight is used as it is, seen as [h, nope + v, kv_lora_rank], so that it follows updates and moves.
    """
    check_kv_b_proj(module)
    kv_b = module.kv_b_proj.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    query = torch.cat((fold_query(q_nope, kv_b), q_rope), dim=-1)
    return unfold_value(latents.attend(module.layer_idx, query, module.scaling), kv_b, module.v_head_dim)


def check_kv_b_proj(module: Any) -> None:
    """Refuse what wraps or replaces the projection, since folding its weight would pass over it."""
    if type(module.kv_b_proj) is not nn.Linear:
        raise TypeError(
            f"kv_b_proj of layer {module.layer_idx} must be a plain torch.nn.Linear, since decode folds its weight "
            f"into the query, got {type(module.kv_b_proj).__name__}: merge adapters and dequantise it first"
        )


def multi_head_attention(
    module: Any,
    query: torch.Tensor,
    rows: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention in multi-head form, by the model's attention implementation (PyTorch's SDPA unless set otherwise).

    Args:
        query: [b, s_q, h, nope + rope].
        rows: [b, s_kv, kv_lora_rank + rope], history and new tokens.
        attention_mask: as transformers made it for that implementation.

    Returns:
        [b, s_q, h, v_head_dim].
    """
    latent, k_rope = rows.unsqueeze(1).split((module.kv_lora_rank, module.qk_rope_head_dim), dim=-1)
    key, value = module.expand_kv(latent, k_rope)
    implementation = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, host.eager_attention_forward
    )
    out, _ = implementation(
        module,
        query.transpose(1, 2),
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=module.scaling,
        **kwargs,
    )
    return out
