"""The launches of a call: tile sizes and split, chosen on the host from shapes alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashlatte.kernels.triton.cache_row import CacheScale
from flashlatte.kernels.triton.config import INTERPRETER_CONFIGS, AttentionConfig, StepConfig, Table, choose
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.rows import BatchQuery
from flashlatte.ops.dense_decode.portable.kernel import DenseCache, PortableDenseDecodeConfig, dense_decode_kernel
from flashlatte.ops.dense_decode.reference import DenseDecodeParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import PartialShape
from flashlatte.split_kv.work import DecodeLaunchPlan, split_config

# Tile sizes for each class of GPUs, chosen by measurement.
TABLE: Table = {
    "hopper": (
        AttentionConfig(16, 64, 8, 3),
        AttentionConfig(32, 64, 8, 3),
        AttentionConfig(64, 64, 8, 3, warpgroups=True, boxes=True),
    ),
    # MMAs of 64 rows would use tensor memory, which has no room for [64, 512] in addition to the scores.
    "blackwell": (AttentionConfig(16, 64, 8, 3), AttentionConfig(32, 64, 8, 3)),
    "ampere": (AttentionConfig(16, 32, 8, 4), AttentionConfig(32, 32, 8, 3), AttentionConfig(64, 32, 8, 3)),
    "small": (AttentionConfig(16, 32, 8, 3), AttentionConfig(32, 16, 8, 3)),
    "other": (AttentionConfig(16, 32, 4), AttentionConfig(32, 32, 4)),
    "interpreter": INTERPRETER_CONFIGS,
}

# float8_e4m3fn keys are converted in registers, which leaves fewer registers for query rows.
FP8_TABLE: Table = {
    "hopper": (AttentionConfig(16, 64, 8, 3), AttentionConfig(64, 64, 8, 3, warpgroups=True)),
    "blackwell": TABLE["blackwell"],
    "ampere": (AttentionConfig(16, 32, 8, 4),),
    "small": (AttentionConfig(16, 32, 8, 3),),
    "other": (AttentionConfig(16, 16, 4),),
    "interpreter": INTERPRETER_CONFIGS,
}

# With batch_invariant: keys per split times the groups of a request's query rows, whose splits run in parallel; and the
# maximum number of splits of a request, over all groups.
_SPLIT_KEYS = 1024
_FIXED_SPLITS = 128


def dense_decode(params: DenseDecodeParams) -> None:
    q, k_cache, block_table, out = params.whole_q, params.k_cache, params.block_table, params.out
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv, _ = k_cache.shape
    head_dim_v = out.shape[3]
    max_pages = block_table.shape[1]
    device = q.device
    is_fp8 = k_cache.dtype != q.dtype
    launch_plan = make_plan(
        gpu_class(device),
        machine.num_sms(device),
        batch,
        s_q * (h_q // h_kv),
        h_kv,
        head_dim,
        head_dim_v,
        page_size,
        max_pages,
        is_fp8,
        params.batch_invariant,
    )
    if is_fp8:
        k_cache = k_cache.view(torch.uint8)
    q_align, k_align, out_align = row_align(q), row_align(k_cache, 16 if is_fp8 else 8), row_align(out)
    query = BatchQuery(q, *(stride // q_align for stride in strides_in_use(q)))
    k_page, k_token, k_head = (stride // k_align for stride in strides_in_use(k_cache))
    boxes = _boxes(k_cache, k_align, launch_plan.step, launch_plan.config)
    cache = DenseCache(k_cache, *boxes, k_page, k_token, k_head, num_pages, block_table, block_table.stride(0))
    limit = min(max_pages * page_size, 2**31 - 1 - launch_plan.config.block_n)
    lengths = key_lengths(batch, None, params.cache_seqlens, limit)
    outputs = outputs_of(out, params.lse, None, params.empty_lse, out_align, h_kv=h_kv)
    step, split = launch_plan.step, launch_plan.split

    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    for first, count in split.launches:
        dense_decode_kernel[(split.ctas(count),)](
            query,
            cache,
            lengths,
            outputs,
            split.grid(first),
            CacheScale(params.k_scale_tensor, params.k_scale_value),
            scratch=scratch,
            softmax_scale=params.softmax_scale,
            causal=int(params.causal),
            CONFIG=PortableDenseDecodeConfig(
                step=step,
                page_size=page_size,
                token_stride=k_token if k_token * k_align == h_kv * head_dim else None,
                q_align=q_align,
                k_align=k_align,
                split=split_config(split, step.block_n, out_align),
                native_fp8=is_fp8 and converts_e4m3(device),
            ),
            num_warps=launch_plan.config.num_warps,
        )
        if scratch is not None:
            combine.launch_combine(split, scratch, outputs, out_align, first, count)


def _boxes(k_cache: torch.Tensor, k_align: int, step: StepConfig, config: AttentionConfig) -> tuple[Any, Any]:
    """TMA descriptors of the two parts of tiles; None if tiles are not loaded by TMA."""
    if not config.boxes:
        return None, None
    num_pages, page_size, h_kv, head_dim = k_cache.shape
    whole = k_align == 8 and page_size % step.block_n == 0 and step.latent == step.latent_dim
    repeats = any(size != 1 and stride == 0 for size, stride in zip(k_cache.shape, k_cache.stride(), strict=True))
    if not whole or repeats or num_pages == 0:
        return None, None
    # TMA requires strides above 0, also for an axis of size 1.
    page_stride, token_stride, head_stride = (stride or head_dim for stride in strides_in_use(k_cache))
    shape, strides = [num_pages, h_kv, page_size, head_dim], [page_stride, head_stride, token_stride, 1]
    latent, rope = (
        TensorDescriptor(k_cache, shape, strides, [1, 1, step.block_n, width]) if width else None
        for width in (step.latent, step.rope)
    )
    return latent, rope


@functools.lru_cache(maxsize=4096)
def make_plan(
    gpu: str,
    num_sms: int,
    batch: int,
    rows: int,
    h_kv: int,
    head_dim: int,
    head_dim_v: int,
    page_size: int,
    max_pages: int,
    is_fp8: bool,
    batch_invariant: bool,
) -> DecodeLaunchPlan:
    table = FP8_TABLE if is_fp8 else TABLE
    chosen, step = choose(table, gpu, rows, head_dim, head_dim_v, in_place=not is_fp8)
    groups_per_head = -(-rows // chosen.block_h)
    groups = h_kv * groups_per_head
    max_blocks = -(-max_pages * page_size // chosen.block_n)
    partial = PartialShape(chosen.block_h, head_dim_v)
    if batch_invariant:
        split_blocks, max_splits = -(-_SPLIT_KEYS * groups // chosen.block_n), max(_FIXED_SPLITS // groups, 1)
        split = plan.fixed(partial, batch, max_blocks, groups, groups_per_head, split_blocks, max_splits)
    else:
        resident = num_sms * chosen.programs
        split = plan.balanced_or_whole(partial, batch, max_blocks, groups, groups_per_head, resident, chosen.block_n)
    return DecodeLaunchPlan(chosen, step, split)
