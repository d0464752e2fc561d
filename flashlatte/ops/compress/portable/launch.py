"""``compress`` in Triton: the first launch sums rows, the second saves the states for later calls.

In this order a ring of states of any length is read before it is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashlatte.kernels.triton.cache_layout import alignment_elements, as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import row_bytes
from flashlatte.kernels.triton.dependent_launch import launch_options, launches_overlap
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.ops.compress.arguments import CompressArgs
from flashlatte.ops.compress.portable.finish import compress_finish_kernel
from flashlatte.ops.compress.portable.operands import Alignments, CompressConstants
from flashlatte.ops.compress.portable.sums import compress_sum_kernel
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use

# Elements of kv that a thread holds, and how many of them are adjacent columns; maximum number of warps.
NUMBERS, TOGETHER, MAX_WARPS = 32, 4, 4
# Up to this number of rows, a program sums all columns, and a thread all rows of its columns. With more rows a program
# sums this number of columns, and the second launch reads the sums from memory.
SHORT_GROUP, COLUMNS_OF_LONG = 8, 32
# Register limits, so that an SM holds four programs of short groups, and on Hopper three of long ones (which spill on
# other GPUs).
REGISTERS_OF_SHORT, REGISTERS_OF_LONG = 128, 168
# The maximum number of tokens that a program scans for completed groups; it is reduced to have at least this number of
# programs.
MAX_WINDOW, PROGRAMS = 16, 512
MAX_WINDOW_OF_LONG, PROGRAMS_OF_LONG = 128, 16
SAVE_BLOCK, SAVE_WARPS = 1024, 4
MAX_SUMS_BYTES = 64 << 20


def compress(args: CompressArgs) -> None:
    kv, cache = args.kv, as_bytes(args.cache)
    tokens, width = kv.shape
    head_dim = args.weight.shape[0]
    rows = triton.next_power_of_2(args.ratio * (1 + args.overlaps))
    columns = head_dim if rows <= SHORT_GROUP else min(head_dim, COLUMNS_OF_LONG)
    in_parts = columns < head_dim
    block = min(rows, NUMBERS // TOGETHER)
    lanes = min(rows // block, max(32 * MAX_WARPS * TOGETHER // columns, 1))
    largest, programs = (MAX_WINDOW_OF_LONG, PROGRAMS_OF_LONG) if in_parts else (MAX_WINDOW, PROGRAMS)
    window = max(1, min(args.ratio, largest, tokens // programs))

    registers = {}
    if in_parts and gpu_class(kv.device) == "hopper":
        registers["maxnreg"] = REGISTERS_OF_LONG
    elif not in_parts and gpu_class(kv.device) in NVIDIA:
        registers["maxnreg"] = REGISTERS_OF_SHORT

    save_blocks, finish_window = 0, max(1, min(MAX_WINDOW, tokens // PROGRAMS))
    if args.state_cache is not None and args.state_table is not None:
        save_blocks = cdiv(width, SAVE_BLOCK)
        if args.state_table.shape[1] * args.state_cache.shape[1] >= tokens:
            # A table with room for all tokens of the call stores all of their states.
            finish_window = 1
    at_once = min(tokens, MAX_SUMS_BYTES // (4 * head_dim)) if in_parts else tokens
    sums = torch.empty((at_once, head_dim), dtype=torch.float32, device=kv.device) if in_parts else None
    # The second launch scans its tokens while the first one ends.
    overlapped = launches_overlap(kv.device)
    shared = _shared(args, cache)
    for first in range(0, tokens, at_once):
        stop = min(first + at_once, tokens)
        compress_sum_kernel[(cdiv(stop - first, window), head_dim // columns)](
            **shared,
            sums=sums,
            first_token=first,
            num_tokens=stop,
            window=window,
            COLUMNS=columns,
            BLOCK_T=block,
            LANES=lanes,
            TOGETHER=TOGETHER,
            MAX_WINDOW=largest,
            OVERLAPPED=overlapped,
            num_warps=max(1, lanes * columns // (32 * TOGETHER)),
            **registers,
            enable_fp_fusion=False,
        )
        # States are saved by the last launch, after all sums.
        save_now = save_blocks if stop == tokens else 0
        if save_now + in_parts == 0:
            continue
        compress_finish_kernel[(cdiv(stop, finish_window), save_now + in_parts)](
            **shared,
            sums=sums,
            first_token=first,
            num_tokens=stop,
            window=finish_window,
            save_blocks=save_now,
            MAX_WINDOW=MAX_WINDOW,
            BLOCK=SAVE_BLOCK,
            OVERLAPPED=overlapped,
            num_warps=SAVE_WARPS,
            enable_fp_fusion=False,
            **launch_options(overlapped),
        )


def _shared(args: CompressArgs, cache: torch.Tensor) -> dict[str, Any]:
    """The common arguments of both kernels: tokens, states, and the target of rows."""
    kv, score, ape, states, table = args.kv, args.score, args.ape, args.state_cache, args.state_table
    requests, columns = (0, 0) if table is None else table.shape
    state_pages, state_page_size = (1, 1) if states is None else states.shape[:2]
    state_strides = (1, 0) if states is None else (stride_in_use(states, 0), stride_in_use(states, 1))
    # The token stride of one-byte formats is the format's.
    row_strides = stride_in_use(cache, 0), 0 if cache.element_size() == 1 else stride_in_use(cache, 1)
    num_slots = cache.shape[0] * cache.shape[1]
    units = Alignments(
        alignment_elements(kv, stride_in_use(kv, 0)),
        alignment_elements(score, stride_in_use(score, 0)),
        alignment_elements(ape, stride_in_use(ape, 0)),
        1 if states is None else alignment_elements(states, *state_strides),
        alignment_elements(cache, *row_strides),
    )
    return {
        "kv": kv,
        "score": score,
        "ape": ape,
        "request_ids": args.request_ids,
        "positions": args.positions,
        "slot_mapping": args.slot_mapping,
        "id_stride": args.request_ids.stride(0),
        "position_stride": args.positions.stride(0),
        "slot_stride": args.slot_mapping.stride(0),
        "kv_stride": stride_in_use(kv, 0) // units.kv,
        "score_stride": stride_in_use(score, 0) // units.score,
        "ape_stride": stride_in_use(ape, 0) // units.ape,
        "state_cache": states,
        "state_table": table,
        "requests": requests,
        "columns": columns,
        "num_state_pages": state_pages,
        "state_page_size": state_page_size,
        "state_page_stride": state_strides[0] // units.state,
        "state_token_stride": state_strides[1] // units.state,
        "table_stride": 0 if table is None else stride_in_use(table, 0),
        "weight": args.weight,
        "cos_sin": args.cos_sin,
        "cache": cache,
        "eps": args.eps,
        "num_slots": num_slots,
        "page_size": cache.shape[1],
        "num_positions": args.cos_sin.shape[0],
        "page_stride": row_strides[0] // units.cache,
        "row_stride": row_strides[1] // units.cache,
        "FORM": CompressConstants(
            head_dim=args.weight.shape[0],
            rope_dim=args.cos_sin.shape[1],
            ratio=args.ratio,
            overlaps=args.overlaps,
            row_bytes=row_bytes(args.layout, args.scale_rounding),
            units=units,
            wide=num_slots >= 2**31,
            native=converts_e4m3(cache.device),
            interpreted=machine.interpreting(),
        ),
    }
