"""Argument groups of both kernels of ``compress``, and the addresses of the paged states."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_row import RowBytes


class Tokens(NamedTuple):
    """A step's tokens. Strides of kv, score and ape are in units of their alignment."""

    kv: Any
    score: Any
    ape: Any
    request_ids: Any
    positions: Any
    slot_mapping: Any
    kv_stride: Any
    score_stride: Any
    ape_stride: Any
    id_stride: Any
    position_stride: Any
    slot_stride: Any


class States(NamedTuple):
    """The paged states. Strides are in units of the cache's alignment."""

    cache: Any
    table: Any
    requests: Any
    columns: Any
    num_pages: Any
    page_size: Any
    page_stride: Any
    token_stride: Any
    table_stride: Any


class RowTarget(NamedTuple):
    """The parameters that turn a group's sum into a row, and the row's cache. Strides are in units of the cache's
    alignment."""

    weight: Any
    cos_sin: Any
    cache: Any
    eps: Any
    num_slots: Any
    page_size: Any
    num_positions: Any
    page_stride: Any
    row_stride: Any


class Alignments(NamedTuple):
    """The alignment of the strides of each tensor, in elements; strides are passed in units of it."""

    kv: int
    score: int
    ape: int
    state: int
    cache: int


class CompressConstants(NamedTuple):
    """A call's constants, in one constant of the kernels.

    Attributes:
        head_dim, rope_dim: of a row.
        ratio: tokens of a group.
        overlaps: whether a row also depends on the preceding group.
        row_bytes: the encoding of a row.
        wide: whether slots exceed 32 bits.
        native: whether the GPU has e4m3 conversion instructions.
        interpreted: whether the kernel runs in Triton's interpreter.
    """

    head_dim: int
    rope_dim: int
    ratio: int
    overlaps: bool
    row_bytes: RowBytes
    units: Alignments
    wide: bool
    native: bool
    interpreted: bool


@triton.jit
def locate_state(states, request, position, wanted, STATE_ALIGN: tl.constexpr):
    """The addresses of the states of positions, and whether each wanted state exists."""
    wanted = wanted & (position < 2**31)
    # 64-bit divisions took longer than loading the row.
    short, page_size = tl.where(wanted, position, 0).to(tl.uint32), states.page_size.to(tl.uint32)
    column = short // page_size
    offset = (short - column * page_size).to(tl.int64)
    entry = states.table + request * states.table_stride + (column % states.columns.to(tl.uint32)).to(tl.int64)
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    found = wanted & (page >= 0) & (page < states.num_pages)
    # tl.where(found, ...) fails to compile here with Triton 3.6 (layout).
    page = tl.minimum(tl.maximum(page, 0), states.num_pages - 1)
    return (page * states.page_stride + offset * states.token_stride) * STATE_ALIGN, found
