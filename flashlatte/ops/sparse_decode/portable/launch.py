"""The launches of a call: tile sizes and split, chosen on the host from shapes alone."""

from __future__ import annotations

import functools

import torch

from flashlatte.kernels.triton.cache_layout import alignment_bytes, as_bytes
from flashlatte.kernels.triton.config import INTERPRETER_CONFIGS, SELECTED_ROWS, AttentionConfig, Table, choose
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.rows import BatchQuery, query_and_rope
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.ops.sparse_decode.portable.kernel import PortableSparseDecodeConfig, SelectedKeys, sparse_decode_kernel
from flashlatte.ops.sparse_decode.portable.tiles import SparseCache, TokenAddress
from flashlatte.ops.sparse_decode.reference import SparseDecodeParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, stride_in_use
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import PartialShape
from flashlatte.split_kv.work import DecodeLaunchPlan, split_config

# Tile sizes for caches with scales, whose tokens are dequantized in registers.
PACKED_TOKENS: Table = {
    "hopper": (
        AttentionConfig(16, 64, 8),
        AttentionConfig(32, 64, 8),
        AttentionConfig(64, 64, 8, warpgroups=True, column_sums=False),
    ),
    "blackwell": (AttentionConfig(16, 64, 8), AttentionConfig(32, 64, 8)),
    "ampere": (AttentionConfig(16, 64, 8), AttentionConfig(32, 32, 8), AttentionConfig(64, 32, 8)),
    "small": (AttentionConfig(16, 32, 8), AttentionConfig(32, 32, 8)),
    "other": (AttentionConfig(16, 16, 4), AttentionConfig(32, 16, 4)),
    "interpreter": INTERPRETER_CONFIGS,
}

# For e4m3 formats: if shared memory has room (``num_stages`` above 1), tiles are prefetched to it in packed form.
STAGED_TOKENS: Table = PACKED_TOKENS | {
    "hopper": (*PACKED_TOKENS["hopper"][:-1], AttentionConfig(64, 64, 8, 5, warpgroups=True)),
}

# Configurations by the formats of a call's caches.
_TABLES = {"rows": SELECTED_ROWS, "packed": PACKED_TOKENS, "staged": STAGED_TOKENS}
# Columns of the latent part of the formats with scales.
_PACKED_LATENT = 512


def sparse_decode(params: SparseDecodeParams) -> None:
    indices, out = params.indices, params.out
    batch, s_q, h_q, _ = params.q.shape
    head_dim_v = out.shape[3]
    device = out.device
    topk = indices.shape[2]
    extra_topk = None if params.extra_indices is None else params.extra_indices.shape[2]
    launch_plan = make_plan(
        gpu_class(device),
        machine.num_sms(device),
        batch * s_q,
        h_q,
        params.head_dim,
        head_dim_v,
        _table(params.layout, params.extra_layout),
        topk,
        extra_topk or 0,
        params.is_uniform,
        params.batch_invariant,
    )
    main_layout, own = _selection(params.k_cache, indices, params.layout)
    second_layout, extra = _selection(params.extra_k_cache, params.extra_indices, params.extra_layout)
    step, split = launch_plan.step, launch_plan.split
    q, query_rope = query_and_rope(params.q, params.q_rope, step.latent_dim, step.rope)
    q_align, out_align = row_align(q), row_align(out)
    query = BatchQuery(q, *(stride // q_align for stride in q.stride()[:3]))
    lengths = key_lengths(batch, s_q, params.topk_length, topk, params.extra_topk_length, extra_topk)
    outputs = outputs_of(out, params.lse, params.attn_sink, params.empty_lse, out_align)

    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    sparse_decode_kernel[(split.ctas(batch * s_q),)](
        query,
        query_rope,
        own,
        extra,
        lengths,
        outputs,
        split.grid(0),
        scratch=scratch,
        softmax_scale=params.softmax_scale,
        CONFIG=PortableSparseDecodeConfig(
            cache_layout=main_layout,
            extra_cache_layout=second_layout,
            step=step,
            split=split_config(split, step.block_n, out_align),
            q_align=q_align,
        ),
        num_warps=launch_plan.config.num_warps,
    )
    if scratch is not None:
        combine.launch_combine(split, scratch, outputs, out_align, 0, batch * s_q)


@functools.lru_cache(maxsize=4096)
def make_plan(
    gpu: str,
    num_sms: int,
    items: int,
    heads: int,
    head_dim: int,
    head_dim_v: int,
    table: str,
    topk: int,
    extra_topk: int,
    is_uniform: bool,
    batch_invariant: bool,
) -> DecodeLaunchPlan:
    plain = table == "rows"
    latent_dim = head_dim_v if plain else _PACKED_LATENT
    chosen, step = choose(_TABLES[table], gpu, heads, head_dim, latent_dim, in_place=plain)
    groups = -(-heads // chosen.block_h)
    max_blocks = -(-topk // chosen.block_n) + -(-extra_topk // chosen.block_n)
    partial = PartialShape(chosen.block_h, head_dim_v)
    if batch_invariant:
        split = plan.whole(partial, items, groups, groups)
    else:
        resident = num_sms * chosen.programs
        split = plan.balanced_or_whole(
            partial, items, max_blocks, groups, groups, resident, chosen.block_n, uniform=is_uniform
        )
    return DecodeLaunchPlan(chosen, step, split)


def _table(*layouts: CacheFormat) -> str:
    if layouts[0].plain:
        return "rows"
    return "staged" if all(map(_can_stage, layouts)) else "packed"


def _can_stage(layout: CacheFormat) -> bool:
    return layout.tiling is not None or (layout.block_scaling is not None and not layout.block_scaling.fp4)


def _selection(
    cache: torch.Tensor | None, indices: torch.Tensor | None, layout: CacheFormat
) -> tuple[TokenAddress | None, SelectedKeys]:
    """The kernel's constants and arguments for a cache."""
    if cache is None or indices is None:
        return None, SelectedKeys(SparseCache(None, 0, 0, 0), None, 0, 0)
    page_stride, token_stride = stride_in_use(cache, 0), stride_in_use(cache, 1)
    if not layout.plain:
        # The rows and planes of a page are multiples of 16 bytes, except for one-byte scales.
        cache = as_bytes(cache)
        align = alignment_bytes(cache, page_stride)
        token_stride = 0
    else:
        align = 8 if page_stride % 8 == 0 and token_stride % 8 == 0 else 1
    slots = cache.shape[0] * cache.shape[1]
    if indices.dtype == torch.int32:
        slots = min(slots, 2**31)
    return (
        TokenAddress(
            layout.tiling,
            layout.block_scaling,
            native=converts_e4m3(cache.device),
            page_size=cache.shape[1],
            wide=max(slots, cache.shape[0] * page_stride // align) > 2**32,
            align=align,
        ),
        SelectedKeys(
            SparseCache(cache, page_stride // align, token_stride // align, slots),
            indices,
            indices.stride(0),
            indices.stride(1),
        ),
    )
