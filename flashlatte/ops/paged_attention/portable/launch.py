"""The launches of a call: tile sizes and split, chosen on the host from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.head_dims import padded, tile_widths
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.ragged_tiles import tile_slots
from flashlatte.ops.paged_attention.arguments import PagedAttentionArgs
from flashlatte.ops.paged_attention.portable.attend import PagedStep
from flashlatte.ops.paged_attention.portable.config import PagedConfig, choose, choose_in_words
from flashlatte.ops.paged_attention.portable.kernel import paged_attention_kernel
from flashlatte.ops.paged_attention.portable.keys import E4M3, E5M2, INT8, PLAIN, KeyForm
from flashlatte.ops.paged_attention.portable.tiles import TILE_NUMBERS, find_tiles_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import row_align
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.plan import PartialShape, SplitPlan

# The overhead of starting a tile, in keys.
_OVERHEAD_KEYS = 64
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
        tiles_each: maximum tiles per request, if only requests of few queries are processed; else 0.
        by_token: whether each token has a slot.
    """

    config: PagedConfig
    in_words: bool
    split: SplitPlan
    block_tokens: int
    slots: int
    tiles_each: int
    by_token: bool


def paged_attention(args: PagedAttentionArgs) -> None:
    attend(args)


def attend(args: PagedAttentionArgs, max_queries: int = 0) -> None:
    """Run all requests, or only those of at most ``max_queries`` (a few) queries. Tokens of no request get out 0 in
    the first case, and are not written in the second."""
    q, k_cache, v_cache, out, lse = args.q, args.k_cache, args.v_cache, args.out, args.lse
    tokens, h_q, head_dim = q.shape
    num_pages, page_size, h_kv = k_cache.shape[:3]
    head_dim_v, heads, device = v_cache.shape[3], h_q // h_kv, q.device
    requests = args.cu_seqlens_q.shape[0] - 1
    has_new = args.k is not None
    gpu = gpu_class(device)
    has_terms = args.softcap > 0 or args.alibi_slopes is not None or args.qq_bias is not None
    is_quantised = k_cache.dtype != q.dtype
    per_token = any(scale is not None and _is_per_token(scale) for scale in (args.k_scale, args.v_scale))
    halves = multiplies_halves(args)
    launch_plan = make_plan(
        gpu,
        machine.num_sms(device),
        tokens,
        requests,
        heads,
        h_kv,
        head_dim,
        head_dim_v,
        args.cached_keys + (tokens if has_new else 0),
        has_terms
        or has_new
        or (is_quantised and not halves)
        or args.prefix_ranges is not None
        or tile_widths(head_dim)[1] > 0,
        max_queries,
        halves and not has_terms and args.prefix_ranges is None and _lie_in_words(k_cache, v_cache.unsqueeze(3)),
        k_cache.shape[3] > 1 or k_cache.stride(4) != 1 or v_cache.stride(3) != 1,
    )
    config, split = launch_plan.config, launch_plan.split
    k_form, k_strides = _form(k_cache, gpu)
    v_form, v_strides = _form(v_cache.unsqueeze(3), gpu)
    first, rest = tile_widths(head_dim)
    step = PagedStep(
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
        ahead=(halves or args.softcap > 0)
        and split.split_blocks is not None
        and page_size % config.block_n == 0
        and config.block_m >= _AHEAD_ROWS.get(gpu, config.block_m + 1),
        has_terms=has_terms,
        softcap=args.softcap > 0,
        alibi=args.alibi_slopes is not None,
        alibi_sqrt=args.alibi_sqrt,
        scaled_keys=per_token or (is_quantised and has_new),
        halves=halves,
        in_words=launch_plan.in_words,
        key_heads=config.key_heads,
        interpreted=gpu == "interpreter",
    )
    native = converts_e4m3(device)
    q_align, out_align = row_align(q), row_align(out)
    ranges = args.prefix_ranges
    tiles = torch.empty(launch_plan.slots, TILE_NUMBERS, dtype=torch.int32, device=device)
    lengths = torch.empty(launch_plan.slots, dtype=torch.int32, device=device)
    outputs = Outputs(
        out if out.dtype == q.dtype else out.view(torch.uint8),
        0,
        out.stride(0) // out_align,
        out.stride(1) // out_align,
        lse,
        0,
        lse.stride(0),
        lse.stride(1),
        args.attn_sink,
        0 if args.attn_sink is None else args.attn_sink.stride(0),
        1,
        heads,
        launch_plan.block_tokens * heads,
        args.empty_lse,
        tiles,
        TILE_NUMBERS,
        args.out_scale,
        args.out_scale_value,
    )
    find_tiles_kernel[(launch_plan.slots,)](
        *by_name(
            find_tiles_kernel,
            tiles=tiles,
            lengths=lengths,
            cu_seqlens_q=args.cu_seqlens_q,
            seqused_k=args.seqused_k,
            seqused_stride=args.seqused_k.stride(0),
            requests=requests,
            total_q=tokens,
            capacity=args.cached_keys,
            window_left=args.window_left,
            window_right=args.window_right,
            prefix_ranges=ranges,
            num_ranges=0 if ranges is None else ranges.shape[1],
            stride_request=0 if ranges is None else ranges.stride(0),
            stride_range=0 if ranges is None else ranges.stride(1),
            max_queries=max_queries,
        ),
        TILES_EACH=launch_plan.tiles_each,
        BY_TOKEN=launch_plan.by_token,
        HAS_NEW=has_new,
        BLOCK_TOKENS=launch_plan.block_tokens,
        BLOCK_N=config.block_n,
        num_warps=1,
    )
    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    paged_attention_kernel[(split.ctas(launch_plan.slots) // config.key_heads,)](
        *by_name(
            paged_attention_kernel,
            outputs,
            q=q,
            q_stride_token=q.stride(0) // q_align,
            q_stride_head=q.stride(1) // q_align,
            k_cache=_as_uint8(k_cache),
            k_stride_page=k_strides[0],
            k_stride_token=k_strides[1],
            k_stride_head=k_strides[2],
            k_stride_piece=k_strides[3],
            k_stride_number=k_strides[4],
            v_cache=_as_uint8(v_cache),
            v_stride_page=v_strides[0],
            v_stride_token=v_strides[1],
            v_stride_head=v_strides[2],
            v_stride_number=v_strides[4],
            **_new_rows("k_new", args.k),
            **_new_rows("v_new", args.v),
            **_scales("k_scale", args.k_scale, args.k_scale_value),
            **_scales("v_scale", args.v_scale, args.v_scale_value),
            block_table=args.block_table,
            stride_table=args.block_table.stride(0),
            num_pages=num_pages,
            softmax_scale=args.softmax_scale,
            window_left=args.window_left,
            window_right=args.window_right,
            prefix_ranges=ranges,
            num_prefix_ranges=0 if ranges is None else ranges.shape[1],
            prefix_stride_request=0 if ranges is None else ranges.stride(0),
            prefix_stride_range=0 if ranges is None else ranges.stride(1),
            softcap=args.softcap or 1.0,
            alibi_slopes=args.alibi_slopes,
            alibi_stride=0 if args.alibi_slopes is None else args.alibi_slopes.stride(0),
            qq_bias=args.qq_bias,
            qq_bias_stride=0 if args.qq_bias is None else args.qq_bias.stride(0),
            qq_bias_size=0 if args.qq_bias is None else args.qq_bias.shape[0],
            lengths=lengths,
            limit=2**31 - 1 - config.block_n,
            scratch=scratch,
            num_items=launch_plan.slots,
            num_groups=split.groups,
            groups_per_head=split.groups_per_head,
            num_splits=split.splits,
        ),
        STEP=step,
        K_FORM=k_form,
        V_FORM=v_form,
        Q_ALIGN=q_align,
        OUT_ALIGN=out_align,
        NATIVE_FP8=native,
        IS_WHOLE=split.split_blocks is not None,
        OVERHEAD=split.overhead,
        num_warps=config.num_warps,
    )
    if scratch is not None:
        combine.launch_combine(split, scratch, outputs, out_align, 0, launch_plan.slots)


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
    ranges = plan.num_ranges(slots, groups, num_sms * config.programs * config.key_heads, max_blocks, partial)
    fills_sms = rows > _WHOLE_ABOVE_ROWS and slots * groups >= _WHOLE_TILES_PER_SM * num_sms
    if ranges is None or fills_sms:
        split = plan.whole(partial, slots, groups, groups_per_head)
    else:
        overhead = -(-_OVERHEAD_KEYS // config.block_n)
        split = plan.balanced(partial, slots, max_blocks, groups, groups_per_head, ranges, overhead)
    return PagedAttentionLaunchPlan(config, of_words is not None, split, block_tokens, slots, tiles_each, by_token)


def _form(cache: torch.Tensor, gpu: str) -> tuple[KeyForm, tuple[int, ...]]:
    """The constants for loading from a cache [pages, page_size, heads, pieces, elements], and its strides as kernel
    arguments."""
    page, token, head, piece, number = cache.stride()
    align = _units(cache)
    kind = _KINDS.get(cache.dtype, PLAIN)
    form = KeyForm(
        kind=kind,
        align=align,
        piece=cache.shape[4],
        element_stride=1 if number == 1 else None,
        native=converts_e4m3(cache.device),
        ptx=gpu in NVIDIA,
        opaque=gpu != "blackwell",
        interpreted=gpu == "interpreter",
    )
    return form, (page // align, token // align, head // align, piece, number)


def _units(cache: torch.Tensor) -> int:
    """The unit of the strides of pages, tokens and heads, in elements: 16 bytes if all are multiples of it, else 1."""
    units = 16 // cache.element_size()
    page, token, head, _, number = cache.stride()
    return units if number == 1 and all(stride % units == 0 for stride in (page, token, head)) else 1


def multiplies_halves(args: PagedAttentionArgs) -> bool:
    """Whether operands are fp16: one-byte elements convert to fp16 in fewer instructions than to bf16.

    Not with new keys, which are bf16, nor with a scale per value, which may exceed fp16.
    """
    scales = (args.k_scale, args.v_scale)
    per_token = any(scale is not None and _is_per_token(scale) for scale in scales)
    return args.k_cache.dtype.itemsize == 1 and args.k is None and not per_token


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


def _as_uint8(cache: torch.Tensor) -> torch.Tensor:
    """The cache, with fp8 viewed as bytes."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 and cache.dtype != torch.int8 else cache


def _is_per_token(scale: torch.Tensor) -> bool:
    return scale.stride()[:2] != (0, 0)


def _new_rows(name: str, rows: torch.Tensor | None) -> dict[str, torch.Tensor | int | None]:
    token, head = (0, 0) if rows is None else rows.stride()[:2]
    return {name: rows, f"{name}_stride_token": token, f"{name}_stride_head": head}


def _scales(name: str, scale: torch.Tensor | None, value: float) -> dict[str, torch.Tensor | int | float | None]:
    page, token, head = (0, 0, 0) if scale is None else scale.stride()
    return {
        name: scale,
        f"{name}_stride_page": page,
        f"{name}_stride_token": token,
        f"{name}_stride_head": head,
        f"{name}_value": value,
    }
