"""The launches of a call: tile sizes and split, chosen on the host from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashlatte.kernels.triton.config import padded, tile_widths
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.ragged_tiles import tile_slots
from flashlatte.kernels.triton.rows import BlockTable, Window, head_rows
from flashlatte.ops.paged_attention.portable.attend import PagedInputs, PagedStep
from flashlatte.ops.paged_attention.portable.config import PagedConfig, choose, choose_in_words
from flashlatte.ops.paged_attention.portable.kernel import paged_attention_kernel
from flashlatte.ops.paged_attention.portable.keys import (
    E4M3,
    E5M2,
    INT8,
    PLAIN,
    KeyForm,
    PagedRows,
    RowCache,
    RowScales,
)
from flashlatte.ops.paged_attention.portable.scores import ScoreTerms
from flashlatte.ops.paged_attention.portable.tiles import TILE_NUMBERS, TileLengths, VisibleRanges, find_tiles_kernel
from flashlatte.ops.paged_attention.reference import PagedAttentionParams, paged_requests
from flashlatte.runtime import machine
from flashlatte.runtime.strides import first_stride, row_align
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.plan import PartialShape, SplitPlan
from flashlatte.split_kv.work import split_config

# If requests have more than this number of rows (a prefill), and there are at least this many tiles per SM, each tile
# is a program: 1.13 to 1.5 times as fast on an H100 (1.00 with a softcap), because a loop over tiles leaves fewer
# registers for the loop over keys.
_WHOLE_TILES_PER_SM = 3
_WHOLE_ABOVE_ROWS = 64
# Classes of GPUs with ``PagedStep.branches``.
_BRANCHING = frozenset({"hopper", "blackwell", "interpreter"})
# Widths of keys and values that 4 and 8 threads can divide into whole words.
_IN_WORDS_HEAD_DIMS = (64, 128)
# Maximum token stride, so that the rows of a step are less than 2^31 words apart.
_IN_WORDS_STRIDE = 2**26
# Classes of GPUs with ``PagedStep.ahead``, and the minimum rows of its tiles. On an H100, with a program for each tile
# and pages of 64, prefill takes 0.93 of the time over e4m3 and 0.90 with a softcap. Over bf16 it takes 1.1 times as
# long with pages of 16, and 1.3 times in the persistent loop, where fewer registers are left.
_AHEAD_ROWS = {"hopper": 128, "interpreter": 16}
_KINDS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.int8: INT8}


@dataclass(frozen=True)
class PagedAttentionLaunchPlan:
    """The launch configuration of a shape.

    Attributes:
        config: tile sizes.
        in_words: whether ``attend_bytes`` runs.
        split: how the keys of tiles are split over CTAs.
        block_tokens: tokens per tile.
        slots: maximum number of tiles.
        tiles_each: maximum tiles per request, if only requests with few queries are processed; else 0.
        by_token: whether each token has a slot.
    """

    config: PagedConfig
    in_words: bool
    split: SplitPlan
    block_tokens: int
    slots: int
    tiles_each: int
    by_token: bool


def attend(params: PagedAttentionParams, max_queries: int = 0) -> None:
    """Run all requests, or only those of at most ``max_queries`` (a few) queries. Tokens of no request get out 0 in
    the first case, and are not written in the second."""
    device = params.q.device
    gpu = gpu_class(device)
    launch_plan = _plan(params, gpu, max_queries)
    config, split, slots = launch_plan.config, launch_plan.split, launch_plan.slots
    step = _step(params, gpu, launch_plan)
    tiles = torch.empty(slots, TILE_NUMBERS, dtype=torch.int32, device=device)
    lengths = torch.empty(slots, dtype=torch.int32, device=device)
    visible = _visible_ranges(params)
    find_tiles_kernel[(slots,)](
        paged_requests(params),
        visible,
        tiles=tiles,
        lengths=lengths,
        max_queries=max_queries,
        TILES_EACH=launch_plan.tiles_each,
        BY_TOKEN=launch_plan.by_token,
        HAS_NEW=params.k is not None,
        BLOCK_TOKENS=launch_plan.block_tokens,
        BLOCK_N=config.block_n,
        num_warps=1,
    )
    k_form, v_form = (_form(cache, gpu) for cache in (params.k_cache, params.v_cache.unsqueeze(3)))
    table = BlockTable(params.block_table, params.block_table.stride(0), params.k_cache.shape[0])
    out_align = row_align(params.out)
    outputs = _outputs(params, tiles, launch_plan.block_tokens, out_align)
    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    paged_attention_kernel[(split.ctas(slots) // config.key_heads,)](
        PagedInputs(
            query=head_rows(params.q, row_align(params.q)),
            k=_rows(params.k_cache, k_form, params.k, params.k_scale, params.k_scale_value),
            v=_rows(params.v_cache.unsqueeze(3), v_form, params.v, params.v_scale, params.v_scale_value),
            table=table,
            visible=visible,
            terms=_score_terms(params),
        ),
        TileLengths(lengths, slots, 2**31 - 1 - config.block_n),
        outputs,
        split.grid(0),
        scratch=scratch,
        softmax_scale=params.softmax_scale,
        K_FORM=k_form,
        V_FORM=v_form,
        STEP=step,
        SPLIT=split_config(split, step.block_n, out_align, native_fp8=converts_e4m3(device)),
        num_warps=config.num_warps,
    )
    if scratch is not None:
        combine.launch_combine(split, scratch, outputs, out_align, 0, slots)


def _plan(params: PagedAttentionParams, gpu: str, max_queries: int) -> PagedAttentionLaunchPlan:
    q, k_cache, v_cache = params.q, params.k_cache, params.v_cache
    tokens, h_q, head_dim = q.shape
    h_kv = k_cache.shape[2]
    has_new = params.k is not None
    halves = multiplies_halves(params)
    has_masks_or_terms = _has_terms(params) or params.prefix_ranges is not None
    converts = k_cache.dtype != q.dtype and not halves
    return make_plan(
        gpu,
        machine.num_sms(q.device),
        tokens,
        params.cu_seqlens_q.shape[0] - 1,
        h_q // h_kv,
        h_kv,
        head_dim,
        v_cache.shape[3],
        params.cached_keys + (tokens if has_new else 0),
        more_registers=has_masks_or_terms or has_new or converts or tile_widths(head_dim)[1] > 0,
        max_queries=max_queries,
        in_words=halves and not has_masks_or_terms and _lie_in_words(k_cache, v_cache.unsqueeze(3)),
        scattered=k_cache.shape[3] > 1 or k_cache.stride(4) != 1 or v_cache.stride(3) != 1,
    )


def _step(params: PagedAttentionParams, gpu: str, launch_plan: PagedAttentionLaunchPlan) -> PagedStep:
    config, split = launch_plan.config, launch_plan.split
    head_dim, head_dim_v, page_size = params.q.shape[2], params.v_cache.shape[3], params.k_cache.shape[1]
    first, rest = tile_widths(head_dim)
    halves, is_whole = multiplies_halves(params), split.split_blocks is not None
    new_and_quantized = params.k is not None and params.k_cache.dtype != params.q.dtype
    return PagedStep(
        block_m=config.block_m,
        block_n=config.block_n,
        head_dim=head_dim,
        first=first,
        rest=rest,
        head_dim_v=head_dim_v,
        width_v=padded(head_dim_v),
        page_size=page_size,
        num_stages=config.num_stages,
        branches=gpu in _BRANCHING,
        ahead=(halves or params.softcap > 0)
        and is_whole
        and page_size % config.block_n == 0
        and config.block_m >= _AHEAD_ROWS.get(gpu, config.block_m + 1),
        has_terms=_has_terms(params),
        softcap=params.softcap > 0,
        alibi=params.alibi_slopes is not None,
        alibi_sqrt=params.alibi_sqrt,
        scaled_keys=_has_scales_per_token(params) or new_and_quantized,
        halves=halves,
        in_words=launch_plan.in_words,
        key_heads=config.key_heads,
    )


def _has_terms(params: PagedAttentionParams) -> bool:
    return params.softcap > 0 or params.alibi_slopes is not None or params.qq_bias is not None


def _has_scales_per_token(params: PagedAttentionParams) -> bool:
    return any(scale is not None and scale.stride()[:2] != (0, 0) for scale in (params.k_scale, params.v_scale))


def multiplies_halves(params: PagedAttentionParams) -> bool:
    """Whether operands are fp16: one-byte elements convert to fp16 in fewer instructions than to bf16.

    Not with new keys, which are bf16, nor with a scale per value, which may exceed fp16.
    """
    return params.k_cache.dtype.itemsize == 1 and params.k is None and not _has_scales_per_token(params)


def _visible_ranges(params: PagedAttentionParams) -> VisibleRanges:
    window, ranges = Window(params.window_left, params.window_right), params.prefix_ranges
    if ranges is None:
        return VisibleRanges(window, None, 0, 0, 0)
    return VisibleRanges(window, ranges, ranges.shape[1], ranges.stride(0), ranges.stride(1))


def _score_terms(params: PagedAttentionParams) -> ScoreTerms:
    slopes, bias = params.alibi_slopes, params.qq_bias
    return ScoreTerms(
        softcap=params.softcap or 1.0,
        alibi_slopes=slopes,
        alibi_stride=first_stride(slopes),
        qq_bias=bias,
        qq_bias_stride=first_stride(bias),
        qq_bias_size=0 if bias is None else bias.shape[0],
    )


def _outputs(params: PagedAttentionParams, tiles: torch.Tensor, block_tokens: int, out_align: int) -> Outputs:
    out, lse, sink = params.out, params.lse, params.attn_sink
    heads = params.q.shape[1] // params.k_cache.shape[2]
    return Outputs(
        out=out if out.dtype == params.q.dtype else out.view(torch.uint8),
        out_stride_request=0,
        out_stride_token=out.stride(0) // out_align,
        out_stride_head=out.stride(1) // out_align,
        lse=lse,
        lse_stride_request=0,
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        sink=sink,
        sink_stride=first_stride(sink),
        tokens=None,
        heads=heads,
        rows=block_tokens * heads,
        empty_lse=params.empty_lse,
        tiles=tiles,
        tiles_stride=TILE_NUMBERS,
        out_scale=params.out_scale,
        out_scale_value=params.out_scale_value,
    )


@functools.lru_cache(maxsize=4096)
def make_plan(
    gpu: str,
    num_sms: int,
    tokens: int,
    requests: int,
    heads: int,
    h_kv: int,
    head_dim: int,
    head_dim_v: int,
    max_keys: int,
    *,
    more_registers: bool,
    max_queries: int = 0,
    in_words: bool = False,
    scattered: bool = False,
) -> PagedAttentionLaunchPlan:
    """``heads``: query heads per key head. ``max_queries`` as for ``attend``: most of these requests are decodes.
    ``in_words``: ``attend_bytes`` supports the call if requests have few rows. ``scattered`` as for ``choose``."""
    rows = (1 if max_queries else -(-tokens // requests)) * heads
    of_words = choose_in_words(gpu, rows, h_kv) if in_words else None
    config = of_words
    if config is None:
        config = choose(gpu, rows, head_dim, head_dim_v, more_registers=more_registers, scattered=scattered)
    block_tokens = max(config.block_m // heads, 1)
    groups_per_head = -(-block_tokens * heads // config.block_m)
    groups = h_kv * groups_per_head
    tiles_each = -(-max_queries // block_tokens)
    slots = requests * tiles_each or tile_slots(tokens, requests, block_tokens)
    by_token = tiles_each == 0 and 0 < tokens < slots
    slots = tokens if by_token else slots
    partial = PartialShape(config.block_m, head_dim_v)
    max_blocks = -(-max_keys // config.block_n) + 1
    fills_sms = rows > _WHOLE_ABOVE_ROWS and slots * groups >= _WHOLE_TILES_PER_SM * num_sms
    if fills_sms:
        split = plan.whole(partial, slots, groups, groups_per_head)
    else:
        resident = num_sms * config.programs * config.key_heads
        split = plan.balanced_or_whole(partial, slots, max_blocks, groups, groups_per_head, resident, config.block_n)
    return PagedAttentionLaunchPlan(config, of_words is not None, split, block_tokens, slots, tiles_each, by_token)


def _form(cache: torch.Tensor, gpu: str) -> KeyForm:
    """The constants for loading from a cache [pages, page_size, heads, pieces, elements]."""
    return KeyForm(
        kind=_KINDS.get(cache.dtype, PLAIN),
        align=_units(cache),
        piece=cache.shape[4],
        element_stride=1 if cache.stride(4) == 1 else None,
        native=converts_e4m3(cache.device),
        ptx=gpu in NVIDIA,
        opaque=gpu != "blackwell",
    )


def _rows(
    cache: torch.Tensor, form: KeyForm, new: torch.Tensor | None, scales: torch.Tensor | None, scale: float
) -> PagedRows:
    """The keys or values in a cache [pages, page_size, heads, pieces, elements] and in ``new``."""
    page, token, head, piece, element = cache.stride()
    as_bytes = cache.dtype.itemsize == 1 and cache.dtype != torch.int8
    scale_page, scale_token, scale_head = (0, 0, 0) if scales is None else scales.stride()
    return PagedRows(
        RowCache(
            cache.view(torch.uint8) if as_bytes else cache,
            page // form.align,
            token // form.align,
            head // form.align,
            piece,
            element,
        ),
        head_rows(new, 1),
        RowScales(scales, scale_page, scale_token, scale_head, scale),
    )


def _units(cache: torch.Tensor) -> int:
    """The unit of the strides of pages, tokens and heads, in elements: 16 bytes if all are multiples of it, else 1."""
    units = 16 // cache.element_size()
    page, token, head, _, number = cache.stride()
    return units if number == 1 and all(stride % units == 0 for stride in (page, token, head)) else 1


def _lie_in_words(*caches: torch.Tensor) -> bool:
    """Whether ``attend_bytes`` can read caches [pages, page_size, heads, pieces, elements]: one-byte elements, at
    multiples of 16 bytes."""
    return all(
        cache.shape[3] == 1
        and cache.shape[4] in _IN_WORDS_HEAD_DIMS
        and cache.data_ptr() % 16 == 0
        and _units(cache) == 16
        and cache.stride(1) < _IN_WORDS_STRIDE
        for cache in caches
    )
