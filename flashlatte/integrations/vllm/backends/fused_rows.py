"""The norms, rotations and cache writes of vLLM's V3.2 layers, for GPUs on which vLLM's own kernels cannot be used.

On CUDA, vLLM computes them in two Triton kernels, ``fused_norm_rope`` and ``fused_q``, and FlashLatte reads the bytes
that they write. That is not possible

* below compute capability 8.9, where Triton refuses their conversions to e4m3;
* if vLLM stores the scales of index keys in DeepGEMM's format (``compat.packs_index_scales``).

The functions of this module have the same arguments and results, and use FlashLatte's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from flashlatte.integrations.vllm import compat
from flashlatte.integrations.vllm.ops import dtypes
from flashlatte.kv_cache.registry import as_format, plain_format
from flashlatte.ops.cache_write import cache_write
from flashlatte.ops.index_quantize import index_quantize
from flashlatte.ops.index_query import index_query
from flashlatte.ops.norm_rope import Rotary, latent_rows, rotate_heads

# The smallest amax from which vLLM computes the scale of an index query.
SMALLEST_AMAX = 1e-4


def fused_norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_weight: torch.Tensor,
    q_eps: float,
    kv_c: torch.Tensor,
    kv_weight: torch.Tensor,
    kv_eps: float,
    k_pe: torch.Tensor,
    cos_sin: torch.Tensor,
    index_k: torch.Tensor | None,
    index_weight: torch.Tensor | None,
    index_bias: torch.Tensor | None,
    index_eps: float,
    index_cos_sin: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    *,
    slot_mapping: torch.Tensor | None,
    indexer_slot_mapping: torch.Tensor | None,
    indexer_k_cache: torch.Tensor | None,
    mla_kv_cache: torch.Tensor | None,
    mla_kv_cache_dtype: str,
    has_indexer: bool,
    index_rope_interleave: bool,
    kv_c_out: torch.Tensor,
    k_pe_out: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Normalized query latents [T, rank]; writes latents [T, latent], rotated keys [T, rope] and both caches."""
    tokens, latent_dim = kv_c.shape
    rows, q_normed = latent_rows(
        torch.cat((kv_c, k_pe), dim=-1),
        kv_weight,
        _rotary(cos_sin, positions, interleaved=True),
        kv_eps,
        q_a=q_c,
        q_weight=q_weight,
        q_eps=q_eps,
    )
    assert q_normed is not None
    latent, rope = rows.split((latent_dim, rows.shape[1] - latent_dim), dim=-1)
    kv_c_out.copy_(latent)
    k_pe_out.copy_(rope)
    if mla_kv_cache is not None and mla_kv_cache.numel() and slot_mapping is not None:
        is_ds_mla = mla_kv_cache_dtype == dtypes.DS_MLA
        layout = (
            as_format(dtypes.DS_MLA_FORMAT) if is_ds_mla else plain_format(mla_kv_cache.dtype, mla_kv_cache.shape[-1])
        )
        slots = slot_mapping.flatten()[:tokens]
        cache_write(mla_kv_cache.unsqueeze(2), slots, latent, rope=rope, cache_format=layout)
    if has_indexer and index_k is not None and index_cos_sin is not None:
        topk_indices_buffer[:tokens] = -1
        if indexer_k_cache is not None and indexer_k_cache.numel():
            slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
            assert slots is not None
            keys = torch.nn.functional.layer_norm(
                index_k.float(), index_k.shape[-1:], _float(index_weight), _float(index_bias), index_eps
            )
            rotated = keys.unsqueeze(1)[..., : index_cos_sin.shape[-1]]
            rotate_heads(rotated, _rotary(index_cos_sin, positions, index_rope_interleave), out=rotated)
            index_quantize(indexer_k_cache, slots.flatten()[:tokens], keys, scale_rounding="power_of_two")
    return q_normed


def fused_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    cos_sin: torch.Tensor,
    index_q: torch.Tensor | None,
    index_cos_sin: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    softmax_scale: float,
    head_scale: float,
    *,
    has_indexer: bool,
    index_rope_interleave: bool,
    quantize_mqa: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Index queries in e4m3 [T, H, head_dim], their weights [T, H], and rotated queries [T, h, rope].

    Raises:
        ValueError: ``quantize_mqa``; FlashLatte takes queries of 16 bits.
    """
    if quantize_mqa:
        raise ValueError("quantize_mqa must be False: FlashLatte takes queries of 16 bits")
    rotated = torch.empty_like(q_pe)
    rotate_heads(q_pe, _rotary(cos_sin, positions, interleaved=True), out=rotated)
    if not has_indexer or index_q is None or index_weights is None or index_cos_sin is None:
        return None, None, rotated
    rotary = _rotary(index_cos_sin, positions, index_rope_interleave)
    values, folded = index_query(
        index_q,
        index_weights,
        rotary.table,
        rotary.positions,
        interleaved=rotary.interleaved,
        softmax_scale=softmax_scale,
        head_scale=head_scale,
        smallest_amax=SMALLEST_AMAX,
        scale_rounding="power_of_two",
    )
    return values, folded, rotated


def install(attention: Any, is_ours: Callable[[Any], bool]) -> None:
    """Replace the two functions in vLLM's module ``attention`` if vLLM's cannot be used on this GPU.

    Args:
        is_ours: whether the metadata of a layer is FlashLatte's.
    """
    compiles = compat.converts_e4m3()
    if compiles and not compat.packs_index_scales():
        return
    for function in (fused_norm_rope, fused_q):
        stock = getattr(attention, function.__name__)
        setattr(attention, function.__name__, _or_stock(function, stock, is_ours) if compiles else function)


def _or_stock(
    function: Callable[..., Any], stock: Callable[..., Any], is_ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """``function`` in a model whose layers have FlashLatte's metadata, else ``stock``."""

    def either(*args: Any, **kwargs: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        ours = isinstance(metadata, dict) and any(map(is_ours, metadata.values()))
        return (function if ours else stock)(*args, **kwargs)

    return either


def _rotary(cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> Rotary:
    """The rotation of tokens by vLLM's table [positions, rope], which may have 16 bits."""
    return Rotary(cos_sin[positions].float(), torch.arange(len(positions), device=positions.device), interleaved)


def _float(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.float()
