"""vLLM's models with an indexer as they are on CUDA, with PyTorch functions in place of their fused kernels.

``model_class_overrides`` names a class of this module. On a GPU it is one of FlashLatte's ``backends.models``.
"""

from __future__ import annotations

import torch
from vllm.models.deepseek_v32 import attention
from vllm.models.deepseek_v32.nvidia import model
from vllm.models.deepseek_v32.nvidia.model import DeepseekV32ForCausalLM as GlmMoeDsaForCausalLM

from flashlatte.integrations.vllm.backends import indexer

DeepseekV32ForCausalLM = GlmMoeDsaForCausalLM
E4M3_MAX = 448.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def rotate(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The first elements of each row [T, ..., d] rotated by ``table`` [T, rope], cosines and then sines."""
    half = table.shape[-1] // 2
    cos, sin = (part.view(-1, *[1] * (x.dim() - 2), half).float() for part in table.split(half, -1))
    x = x.float()
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.split(half, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), -1)


def quantize(x: torch.Tensor, smallest: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as e4m3, and a power-of-two scale for each row [..., 1]."""
    scale = (x.abs().amax(-1, keepdim=True).clamp_min(smallest) / E4M3_MAX).log2().ceil().exp2()
    return (x / scale).to(torch.float8_e4m3fn), scale


def store_latents(cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
    """Write to a cache of plain values, or of 656 bytes a token: e4m3, four scales, bf16."""
    kept = slots >= 0
    pages, offsets = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    if cache.shape[-1] != 656:
        cache[pages, offsets] = torch.cat((latent, rope), -1)[kept].to(cache.dtype)
        return
    values, scales = quantize(latent.unflatten(-1, (4, 128)))
    parts = (values.flatten(-2), scales.squeeze(-1).float(), rope.bfloat16())
    row = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    cache.view(torch.uint8)[pages, offsets] = row[kept]


def store_index_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Write to pages of e4m3 keys followed by their scales, or of float32 keys."""
    page_size = cache.shape[1]
    if cache.dtype == torch.float32:
        for slot, key in zip(slots.tolist(), keys, strict=False):
            if slot >= 0:
                cache[slot // page_size, slot % page_size] = key
        return
    values, scales = quantize(keys)
    for slot, value, scale in zip(slots.tolist(), values.view(torch.uint8), scales, strict=False):
        if slot >= 0:
            page, offset = cache[slot // page_size].view(-1), slot % page_size
            page[offset * 128 : offset * 128 + 128] = value
            begin = page_size * 128 + offset * 4
            page[begin : begin + 4] = scale.view(torch.uint8)


def fused_norm_rope(
    positions,
    q_c,
    q_weight,
    q_eps,
    kv_c,
    kv_weight,
    kv_eps,
    k_pe,
    cos_sin,
    index_k,
    index_weight,
    index_bias,
    index_eps,
    index_cos_sin,
    topk_indices_buffer,
    *,
    slot_mapping,
    indexer_slot_mapping,
    indexer_k_cache,
    mla_kv_cache,
    has_indexer,
    index_rope_interleave,
    kv_c_out,
    k_pe_out,
    **_,
):
    latent = rms_norm(kv_c, kv_weight, kv_eps)
    rope = rotate(k_pe, cos_sin[positions], interleaved=True)
    kv_c_out.copy_(latent)
    k_pe_out.copy_(rope)
    if mla_kv_cache is not None and mla_kv_cache.numel():
        store_latents(mla_kv_cache, slot_mapping, latent[: len(slot_mapping)], rope[: len(slot_mapping)])
    if has_indexer:
        topk_indices_buffer[: len(positions)] = -1
        keys = torch.nn.functional.layer_norm(
            index_k.float(), index_k.shape[-1:], index_weight.float(), index_bias.float(), index_eps
        )
        keys = rotate(keys, index_cos_sin[positions], index_rope_interleave)
        if indexer_k_cache is not None and indexer_k_cache.numel():
            store_index_keys(indexer_k_cache, indexer_slot_mapping, keys)
    return rms_norm(q_c, q_weight, q_eps).to(q_c.dtype)


def fused_q(
    positions,
    q_pe,
    cos_sin,
    index_q,
    index_cos_sin,
    ql_nope,
    q_scale,
    index_weights,
    softmax_scale,
    head_scale,
    *,
    has_indexer,
    index_rope_interleave,
    quantize_mqa,
):
    assert not quantize_mqa
    rope = rotate(q_pe, cos_sin[positions], interleaved=True).to(q_pe.dtype)
    if not has_indexer:
        return None, None, rope
    queries = rotate(index_q, index_cos_sin[positions], index_rope_interleave)
    values, scales = quantize_queries(queries)
    return values, index_weights.float() * scales.squeeze(-1) * softmax_scale * head_scale, rope


quantize_queries = quantize


def fused_embed_norm(ids, table, *, chain_weight, eps):
    rows = table[ids]
    return rows, rms_norm(rows, chain_weight, eps).to(rows.dtype)


indexer.install()
attention.fused_norm_rope, attention.fused_q = fused_norm_rope, fused_q
model.fused_embed_norm = fused_embed_norm
