"""The producer for a cache of one-byte elements: four warps that cast keys to the dtype of the queries.

A half of a block is held in registers until its tile is empty. Meanwhile the loads of the next half are in flight, and
the blocks of the next step are prefetched into L2. The consumers fence the producer's stores: a fence waits for loads
in flight, and consumers have none. Tiles hold the exact values; their scale is applied to scores and output.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LATENT,
    ROPE,
    of_block,
)
from flashlatte.kernels.hopper.ptx import e4m3
from flashlatte.kernels.hopper.ptx.registers import wait_loads
from flashlatte.kernels.hopper.ptx.threads import shuffle_from_lanes
from flashlatte.kernels.hopper.word_layouts import THREADS, flat, load_words, words_layout, words_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.producer import (
    finish,
    load_queries,
    load_query_ropes,
    prefetch_block,
    signal_queries,
)
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.split_kv import device

# Words of half a row, and of the rope.
_HALF_WORDS = gl.constexpr(HALF.value // 4)
_ROPE_WORDS = gl.constexpr(ROPE.value // 4)
_HALF_LAYOUT = gl.constexpr(flat(words_layout(2, 32)))
_ROPE_LAYOUT = gl.constexpr(flat(words_layout(1, 16)))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _HALF_LAYOUT))


class OneByteKeys(NamedTuple):
    """The cache [pages, page_size, h_kv, d] (after ``in_words`` as int32) and its strides in units of 16 bytes."""

    k_cache: Pointer
    stride_page: Int64
    stride_token: Int64
    stride_head: Int64


class OneByteRows(NamedTuple):
    """Keys of a block: pointers to their words [64], and whether they exist."""

    words: Any
    valid: Any


@gluon.jit
def in_words(keys):
    """The same cache as int32."""
    words = keys.k_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    return OneByteKeys(words, keys.stride_page, keys.stride_token, keys.stride_head)


class OneByteHalf(NamedTuple):
    """Words of half of a block, and of its rope; without rope, the half's words again."""

    words: Any
    rope: Any


@gluon.jit
def _rows_of(args, words, split, page, block, CONFIG: gl.constexpr):
    """The keys of a block. ``page``: from ``schedule.page_of``. ``words``: pointer to the kv head. Pointers of missing
    keys refer to other keys."""
    keys = args.keys
    PAGE_SIZE: gl.constexpr = CONFIG.box * CONFIG.boxes_per_page
    token = gl.arange(0, KEYS, _TOKENS)
    valid = block * KEYS + token < split.length
    if CONFIG.box == KEYS:
        valid = valid & (page >= 0)
        first = gl.maximum(page, 0).to(gl.int64) * keys.stride_page
        first += (block % CONFIG.boxes_per_page * KEYS).to(gl.int64) * keys.stride_token
    else:
        page = shuffle_from_lanes(page, token // CONFIG.box)
        valid = valid & (page >= 0)
        first = gl.maximum(page, 0).to(gl.int64) * keys.stride_page
        token = (block * KEYS % PAGE_SIZE + token) % PAGE_SIZE
    return OneByteRows(words + (first + token.to(gl.int64) * keys.stride_token) * 4, valid)


@gluon.jit
def _load_left(rows):
    words = load_words(rows.words, 0, _HALF_LAYOUT)
    return OneByteHalf(words, words)


@gluon.jit
def _load_right(rows, HAS_ROPE: gl.constexpr):
    words = load_words(rows.words, _HALF_WORDS, _HALF_LAYOUT)
    if HAS_ROPE:
        return OneByteHalf(words, load_words(rows.words, LATENT // 4, _ROPE_LAYOUT))
    else:
        return OneByteHalf(words, words)


@gluon.jit
def _wait_loaded(half, HAS_ROPE: gl.constexpr):
    """A half after its loads have completed."""
    (words,) = wait_loads((half.words,), 2 * _HALF_WORDS // THREADS)
    if HAS_ROPE:
        (rope,) = wait_loads((half.rope,), 2 * _ROPE_WORDS // THREADS)
        return OneByteHalf(words, rope)
    else:
        return OneByteHalf(words, words)


@gluon.jit
def _factor(half, rows, HAS_ROPE: gl.constexpr, DTYPE: gl.constexpr):
    """The ``expand`` factor of each key: 0 if it does not exist, NaN if it has a NaN in this half."""
    nan = e4m3.has_nan((half.words,), _HALF_WORDS // THREADS)
    if HAS_ROPE:
        rope_nan = e4m3.has_nan((half.rope,), _ROPE_WORDS // THREADS)
        nan = nan | gl.convert_layout(rope_nan, nan.type.layout, assert_trivial=True)
    factor = gl.where(nan, e4m3.nan_factor(DTYPE), e4m3.exact_factor(DTYPE))
    return gl.where(rows.valid, gl.convert_layout(factor, _TOKENS, assert_trivial=True), 0)


@gluon.jit
def _store(tile, words, factor, DTYPE: gl.constexpr):
    LAYOUT: gl.constexpr = words.type.layout
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    words_of(tile).store(e4m3.expand(words, factor, DTYPE))


@gluon.jit
def _fill(tile, rope_tile, half, factor, full, HAS_ROPE: gl.constexpr):
    """Fill half of a block and signal its full barrier."""
    _store(tile, half.words, factor, tile.dtype)
    if HAS_ROPE:
        _store(rope_tile, half.rope, factor, tile.dtype)
    mbarrier.arrive(full)


@gluon.jit
def produce(args, CONFIG: gl.constexpr):
    table, k0, k1, full = args.table, args.tiles.k0, args.tiles.k1, args.full
    HAS_ROPE: gl.constexpr = CONFIG.has_rope
    DTYPE: gl.constexpr = k0.left.dtype
    words = args.keys.k_cache + args.work.group.kv_head * args.keys.stride_head * 4
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    # Always true. Without these branches the compiler would move the wait for the next half before the arrival for this
    # one.
    always = args.key_lengths.num_items > 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        if split.end > split.begin:
            page = schedule.page_of(table, split, 2 * split.begin, CONFIG)
            next_page = schedule.page_of(table, split, 2 * split.begin + 1, CONFIG)
            prefetch_block(args, next_page, 2 * split.begin + 1, CONFIG)
            rows = _rows_of(args, words, split, page, 2 * split.begin, CONFIG)
            left = _load_left(rows)
            barriers.wait(Q_EMPTY, barriers.ALL_THREADS)
            load_queries(args, item, CONFIG)
            load_query_ropes(args, item, CONFIG)
            # One body for even and odd blocks: with half of the code, one request takes 0.85 of the time if its
            # instructions have to be fetched from memory, as in a model.
            for block in range(2 * split.begin, 2 * split.end):
                odd = block & 1
                left = _wait_loaded(left, False)
                right = _load_right(rows, HAS_ROPE)
                page = schedule.page_of(table, split, block + 2, CONFIG)
                factor = _factor(left, rows, False, DTYPE)
                if always:
                    barriers.wait_at(K0_LEFT_EMPTY + odd * (K1_LEFT_EMPTY - K0_LEFT_EMPTY), barriers.PAIR_THREADS)
                    tile, full_left = of_block(odd, k0.left, k1.left), of_block(odd, full.k0.left, full.k1.left)
                    _fill(tile, k0.rope, left, factor, full_left, False)

                right = _wait_loaded(right, HAS_ROPE)
                next_rows = _rows_of(args, words, split, next_page, block + 1, CONFIG)
                left = _load_left(next_rows)
                prefetch_block(args, page, block + 2, CONFIG)
                factor = _factor(right, rows, HAS_ROPE, DTYPE)
                if always:
                    barriers.wait_at(K0_RIGHT_EMPTY + odd * (K1_RIGHT_EMPTY - K0_RIGHT_EMPTY), barriers.PAIR_THREADS)
                    tile, rope = of_block(odd, k0.right, k1.right), of_block(odd, k0.rope, k1.rope)
                    _fill(tile, rope, right, factor, of_block(odd, full.k0.right, full.k1.right), HAS_ROPE)
                    if block == 2 * split.begin:
                        signal_queries(args)
                rows, next_page = next_rows, page
        length = device.key_count(item + 1, args.key_lengths)
    finish(args, CONFIG)
