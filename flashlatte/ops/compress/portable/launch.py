"""``compress`` in Triton: the first launch sums rows, the second saves the states for later calls.

In this order a ring of states of any length is read before it is written.
"""

from __future__ import annotations

import torch
import triton

from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv
from flashlatte.kernels.triton.cache_row import row_bytes
from flashlatte.kernels.triton.dependent_launch import launch_options, launches_overlap
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import NVIDIA, gpu_class
from flashlatte.kernels.triton.rows import cache_rows, token_rows
from flashlatte.ops.compress.portable.finish import compress_finish_kernel
from flashlatte.ops.compress.portable.operands import CompressConstants, RowTarget, States, Tokens
from flashlatte.ops.compress.portable.sums import compress_sum_kernel
from flashlatte.ops.compress.reference import CompressParams
from flashlatte.runtime.strides import stride_in_use

# Elements of kv that a thread holds, and how many of them are adjacent columns; maximum number of warps.
ELEMENTS, ADJACENT, MAX_WARPS = 32, 4, 4
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


def compress(params: CompressParams) -> None:
    kv, cache = params.kv, as_bytes(params.cache)
    tokens, width = kv.shape
    head_dim = params.weight.shape[0]
    rows = triton.next_power_of_2(params.ratio * (1 + params.overlaps))
    columns = head_dim if rows <= SHORT_GROUP else min(head_dim, COLUMNS_OF_LONG)
    in_parts = columns < head_dim
    block = min(rows, ELEMENTS // ADJACENT)
    lanes = min(rows // block, max(32 * MAX_WARPS * ADJACENT // columns, 1))
    largest, programs = (MAX_WINDOW_OF_LONG, PROGRAMS_OF_LONG) if in_parts else (MAX_WINDOW, PROGRAMS)
    window = max(1, min(params.ratio, largest, tokens // programs))

    registers = {}
    if in_parts and gpu_class(kv.device) == "hopper":
        registers["maxnreg"] = REGISTERS_OF_LONG
    elif not in_parts and gpu_class(kv.device) in NVIDIA:
        registers["maxnreg"] = REGISTERS_OF_SHORT

    save_blocks, finish_window = 0, max(1, min(MAX_WINDOW, tokens // PROGRAMS))
    if params.state_cache is not None and params.state_table is not None:
        save_blocks = cdiv(width, SAVE_BLOCK)
        if params.state_table.shape[1] * params.state_cache.shape[1] >= tokens:
            # A table with room for all tokens of the call stores all of their states.
            finish_window = 1
    at_once = min(tokens, MAX_SUMS_BYTES // (4 * head_dim)) if in_parts else tokens
    sums = torch.empty((at_once, head_dim), dtype=torch.float32, device=kv.device) if in_parts else None
    # The second launch scans its tokens while the first one ends.
    overlapped = launches_overlap(kv.device)
    records, form = _records(params, cache), _constants(params, cache)
    for first in range(0, tokens, at_once):
        stop = min(first + at_once, tokens)
        compress_sum_kernel[(cdiv(stop - first, window), head_dim // columns)](
            *records,
            sums=sums,
            FORM=form,
            first_token=first,
            num_tokens=stop,
            window=window,
            COLUMNS=columns,
            BLOCK_T=block,
            LANES=lanes,
            ADJACENT=ADJACENT,
            MAX_WINDOW=largest,
            OVERLAPPED=overlapped,
            num_warps=max(1, lanes * columns // (32 * ADJACENT)),
            **registers,
            enable_fp_fusion=False,
        )
        # States are saved by the last launch, after all sums.
        save_now = save_blocks if stop == tokens else 0
        if save_now + in_parts == 0:
            continue
        compress_finish_kernel[(cdiv(stop, finish_window), save_now + in_parts)](
            *records,
            sums=sums,
            FORM=form,
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


def _records(params: CompressParams, cache: torch.Tensor) -> tuple[Tokens, States, RowTarget]:
    """The records that both kernels take."""
    request_ids, positions, slot_mapping = params.request_ids, params.positions, params.slot_mapping
    states, table = params.state_cache, params.state_table
    requests, columns = (0, 0) if table is None else table.shape
    num_pages, page_size = (1, 1) if states is None else states.shape[:2]
    return (
        Tokens(
            *token_rows(params.kv),
            *token_rows(params.score),
            *token_rows(params.ape),
            request_ids,
            request_ids.stride(0),
            positions,
            positions.stride(0),
            slot_mapping,
            slot_mapping.stride(0),
        ),
        States(
            *cache_rows(states, strided=True),
            num_pages,
            page_size,
            table,
            0 if table is None else stride_in_use(table, 0),
            requests,
            columns,
        ),
        RowTarget(
            # The token stride of one-byte formats is the format's.
            *cache_rows(cache, strided=cache.element_size() > 1),
            cache.shape[0] * cache.shape[1],
            cache.shape[1],
            params.weight,
            params.eps,
            params.cos_sin,
            params.cos_sin.shape[0],
        ),
    )


def _constants(params: CompressParams, cache: torch.Tensor) -> CompressConstants:
    return CompressConstants(
        head_dim=params.weight.shape[0],
        rope_dim=params.cos_sin.shape[1],
        ratio=params.ratio,
        overlaps=params.overlaps,
        row_bytes=row_bytes(params.layout, params.scale_rounding),
        wide=cache.shape[0] * cache.shape[1] >= 2**31,
        native=converts_e4m3(cache.device),
    )
