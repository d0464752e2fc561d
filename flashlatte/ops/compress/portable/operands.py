"""What both kernels of ``compress`` are given, in groups."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """What becomes of a group's sum, and the cache that takes it. Strides are in units of the cache's alignment."""

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
    """Numbers of which the strides of each tensor are multiples, and in which they are counted."""

    kv: int
    score: int
    ape: int
    state: int
    cache: int


class CompressConstants(NamedTuple):
    """A call's constants, as one of the kernels'.

    Attributes:
        head_dim, rope_dim: of a row.
        ratio: tokens of a group.
        overlaps: whether a row is made of the group before, too.
        row_bytes: how a row becomes bytes.
        wide: whether slots pass 32 bits.
        native: whether the GPU converts e4m3.
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
