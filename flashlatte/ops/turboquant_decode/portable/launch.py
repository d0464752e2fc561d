"""The launches of a call: tile sizes and split, chosen on the host from shapes alone."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.rows import BlockTable
from flashlatte.kernels.triton.turboquant import records_of
from flashlatte.kv_cache.turboquant import TurboQuantFormat
from flashlatte.ops.turboquant_decode.portable.kernel import RotatedQueries, TurboQuantStep, turboquant_decode_kernel
from flashlatte.ops.turboquant_decode.portable.queries import TurboQuantQuery, rotate_queries_kernel
from flashlatte.ops.turboquant_decode.portable.records import first_of
from flashlatte.ops.turboquant_decode.reference import TurboQuantDecodeParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, stride_in_use, strides_in_use
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import PartialShape, SplitPlan
from flashlatte.split_kv.work import split_config

_LOG2_E = 1.4426950408889634
# The minimum number of query rows of an MMA on NVIDIA GPUs.
_MIN_ROWS = 8
# Query rows and warps of a program that rotates queries.
_ROTATED_ROWS, _ROTATING_WARPS = 16, 4
# The minimum head dim whose words fill a thread's elements of an operand.
_SMALLEST_PACKED = 64


class TurboQuantConfig(NamedTuple):
    """Tile sizes of a program.

    Attributes:
        block_m: query rows, if there are more than 8.
        block_n: keys of a step.
        num_warps: warps per program. One warp keeps a step's scores and P in its registers.
        num_stages: pipeline stages of the loop over keys: the number of prefetched blocks, plus one.
        programs: programs resident on an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


TABLE: dict[str, TurboQuantConfig] = {
    "hopper": TurboQuantConfig(16, 32, 1, 2, 8),
    "blackwell": TurboQuantConfig(16, 32, 1, 3, 8),
    "ampere": TurboQuantConfig(16, 32, 1, 3, 7),
    "small": TurboQuantConfig(16, 32, 1, 2, 6),
    "other": TurboQuantConfig(16, 32, 4, 1, 1),
    "interpreter": TurboQuantConfig(16, 16, 1, 1, 1),
}


class TurboQuantLaunchPlan(NamedTuple):
    """Tile sizes, and how requests are split over CTAs."""

    config: TurboQuantConfig
    split: SplitPlan


def turboquant_decode(params: TurboQuantDecodeParams) -> None:
    q, cache, block_table, out, layout = params.q, params.cache, params.block_table, params.out, params.layout
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv = cache.shape[:3]
    heads, device = h_q // h_kv, q.device
    max_pages = block_table.shape[1]
    gpu = gpu_class(device)
    launch_plan = make_plan(gpu, machine.num_sms(device), batch, s_q * heads, h_kv, head_dim, page_size, max_pages)
    config, split = launch_plan.config, launch_plan.split
    packed, native = gpu in NVIDIA and head_dim >= _SMALLEST_PACKED, converts_e4m3(device)
    records, form = records_of(cache, layout, 8, native=native)
    has_usual_stride = records.stride_token * form.align in _usual_token_strides(layout, h_kv)
    step = TurboQuantStep(
        block_m=config.block_m,
        block_n=config.block_n,
        page_size=page_size,
        num_stages=config.num_stages,
        first_value=first_of(layout.value_offset, layout.value_bits, form.align) if packed else 0,
        packed_keys=packed and (layout.rotates or native),
        packed_values=packed,
        token_stride=records.stride_token if has_usual_stride else None,
    )
    q_align, out_align = row_align(q), row_align(out)
    outputs = outputs_of(out, params.lse, None, params.empty_lse, out_align, h_kv=h_kv)
    rotated = torch.empty(batch, s_q, h_q, head_dim, dtype=torch.float16, device=device)
    row_scale = torch.empty(batch, s_q, h_q, dtype=torch.float32, device=device)
    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    rotate_queries_kernel[(cdiv(batch * s_q * h_q, _ROTATED_ROWS),)](
        TurboQuantQuery(q, *(stride // q_align for stride in strides_in_use(q)), tokens=s_q, heads=h_q),
        rotated=rotated,
        row_scale=row_scale,
        factor=params.softmax_scale * _LOG2_E * (head_dim**-0.5 if layout.rotates else 1.0),
        rows=batch * s_q * h_q,
        D=head_dim,
        ROTATES=layout.rotates,
        Q_ALIGN=q_align,
        BLOCK_R=_ROTATED_ROWS,
        num_warps=_ROTATING_WARPS,
    )
    turboquant_decode_kernel[(split.ctas(batch),)](
        RotatedQueries(rotated, row_scale, s_q, h_q),
        records,
        BlockTable(block_table, stride_in_use(block_table, 0), num_pages),
        key_lengths(batch, 1, params.cache_seqlens, min(max_pages * page_size, 2**31 - 1 - config.block_n)),
        outputs,
        split.grid(0),
        scratch=scratch,
        STEP=step,
        FORM=form,
        CAUSAL=params.causal and s_q > 1,
        SPLIT=split_config(split, step.block_n, out_align),
        num_warps=config.num_warps,
    )
    if scratch is not None:
        combine.launch_combine(split, scratch, outputs, out_align, 0, batch)


def _usual_token_strides(layout: TurboQuantFormat, h_kv: int) -> tuple[int, int]:
    """The token strides, in bytes, of caches allocated by vLLM and by ``kv_cache.turboquant``, which the kernel is
    specialized for."""
    return h_kv * layout.record_bytes, h_kv * layout.allocated_bytes


@functools.lru_cache(maxsize=4096)
def make_plan(
    gpu: str, num_sms: int, batch: int, rows: int, h_kv: int, head_dim: int, page_size: int, max_pages: int
) -> TurboQuantLaunchPlan:
    """``rows``: query rows of a request per key head."""
    config = TABLE[gpu]
    if gpu in NVIDIA and rows <= _MIN_ROWS:
        # A third stage took 277 us instead of 316 on an H100, 4-bit codes; 16 rows leave too few registers for it.
        config = config._replace(block_m=_MIN_ROWS, num_stages=max(config.num_stages, 3))
    groups_per_head = -(-rows // config.block_m)
    groups = h_kv * groups_per_head
    max_blocks = -(-max_pages * page_size // config.block_n)
    partial = PartialShape(config.block_m, head_dim)
    resident = num_sms * config.programs
    split = plan.balanced_or_whole(partial, batch, max_blocks, groups, groups_per_head, resident, config.block_n)
    return TurboQuantLaunchPlan(config, split)
