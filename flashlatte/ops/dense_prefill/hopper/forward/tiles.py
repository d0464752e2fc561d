"""Tiles in shared memory, and the barriers that synchronize producer and consumers."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.barriers import allocate_mbarriers
from flashlatte.kernels.hopper.two_consumers import CHUNK, ROWS, SCALAR_LAYOUT, STAGES, PrefillConsumer, read_scalars


class DensePrefillConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        keys: keys of a block.
        align: unit of the strides of out, in elements.
        pack, has_pages: as in ``prefill_consumers.consume``.
    """

    d_qk: Any
    d_v: Any
    align: Any
    keys: Any
    pack: Any = 1
    has_pages: Any = False


class DensePrefillTile(NamedTuple):
    """A work tile: queries of one head, and the range of visible blocks of keys.

    Attributes:
        blocks: blocks of keys, at least 1; 0 ends the loop.
        last: index of the last block; blocks are processed in descending order.
        head: query head.
        token: index of the first query token.
        rows: query tokens of the tile, 1 to 128.
        position: position of the first query relative to key 0 (may be negative). Key 0 is the request's first key that
            is visible to a query.
        keys: number of keys of the request from key 0 on.
    """

    blocks: Any
    last: Any
    head: Any
    token: Any
    rows: Any
    position: Any
    keys: Any


class DensePrefillShared(NamedTuple):
    """The consumers and the rings of blocks, with 2 stages each.

    A consumer's q is ([d_qk / 64, 64, 64]), optionally [1, 64, rest]: its leading axis is the chunk of columns, and the
    rest of, for example, 72 columns is a separate tile. In ``k``, the chunks of a stage are contiguous.
    """

    first: PrefillConsumer
    second: PrefillConsumer
    k: Any  # ([2 * d_qk / 64, keys, 64]), optionally [2, keys, rest]
    v: Any  # ([2, keys, columns]), optionally [2, keys, rest]
    k_full: Any  # [2, 1]
    v_full: Any


@gluon.constexpr_function
def keys_per_block(d_qk, d_v):
    """Keys per block: fewer for wide rows, because an output of 256 columns leaves few registers for scores."""
    return 128 if d_qk <= 192 and d_v <= 128 else 64


@gluon.constexpr_function
def padded(columns):
    """Columns of a tile: a power of two from 16 on."""
    return max(16, 1 << (columns - 1).bit_length())


@gluon.constexpr_function
def rest_of(d_qk):
    """Columns of the tile after the chunks of q and k; 0 if there is none."""
    rest = padded(d_qk % CHUNK.value) if d_qk % CHUNK.value else 0
    return 0 if rest == CHUNK.value else rest


@gluon.constexpr_function
def num_chunks(d_qk):
    return d_qk // CHUNK.value if rest_of(d_qk) else -(-d_qk // CHUNK.value)


@gluon.constexpr_function
def first_columns(d_v):
    """Columns of the first tile of values."""
    return padded(d_v) // 2 if second_columns(d_v) else padded(d_v)


@gluon.constexpr_function
def second_columns(d_v):
    """Columns of the second tile of values; 0 if there is only one tile."""
    half = padded(d_v) // 2
    rest = padded(d_v - half)
    return rest if rest < half else 0


@gluon.constexpr_function
def _swizzled(columns):
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)


@gluon.jit
def _tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROW_COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROW_COUNT, COLUMNS], _swizzled(COLUMNS))


@gluon.jit
def _rows_of_keys(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROW_COUNT: gl.constexpr, D_QK: gl.constexpr):
    """COUNT tiles of rows of q or k: their chunks, and a tile for the rest of the row."""
    chunks = _tiles(DTYPE, COUNT * num_chunks(D_QK), ROW_COUNT, CHUNK)
    if rest_of(D_QK) == 0:
        return (chunks,)
    else:
        return chunks, _tiles(DTYPE, COUNT, ROW_COUNT, rest_of(D_QK))


@gluon.jit
def _values(DTYPE: gl.constexpr, KEYS: gl.constexpr, D_V: gl.constexpr):
    first = _tiles(DTYPE, STAGES, KEYS, first_columns(D_V))
    if second_columns(D_V) == 0:
        return (first,)
    else:
        return first, _tiles(DTYPE, STAGES, KEYS, second_columns(D_V))


@gluon.jit
def _consumer(DTYPE: gl.constexpr, D_QK: gl.constexpr):
    return PrefillConsumer(
        _rows_of_keys(DTYPE, 1, ROWS, D_QK),
        gl.allocate_shared_memory(gl.int32, [7, 1], SCALAR_LAYOUT),
        allocate_mbarriers(1),
    )


@gluon.jit
def allocate(DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    D_QK: gl.constexpr = CONFIG.d_qk
    D_V: gl.constexpr = CONFIG.d_v
    KEYS: gl.constexpr = CONFIG.keys
    return DensePrefillShared(
        _consumer(DTYPE, D_QK),
        _consumer(DTYPE, D_QK),
        _rows_of_keys(DTYPE, STAGES, KEYS, D_QK),
        _values(DTYPE, KEYS, D_V),
        allocate_mbarriers(STAGES),
        allocate_mbarriers(STAGES),
    )


@gluon.jit
def read_work_tile(smem):
    return DensePrefillTile(*read_scalars(smem))
