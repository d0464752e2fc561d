"""The caster: four warps that cast keys from the ring into tiles of float16."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.ptx import e4m3
from flashlatte.kernels.hopper.ptx.registers import wait_loads
from flashlatte.kernels.hopper.word_layouts import THREADS, as_words, flat, words_layout, words_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import (
    SLOT_BARRIER_THREADS,
    SLOT_EMPTY,
    SLOTS,
    TILE_BARRIER_THREADS,
    TILE_EMPTY,
    TILE_FULL,
)
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.split_kv import device

_HALF_LAYOUT = gl.constexpr(flat(words_layout(4, 16)))
_ROPE_LAYOUT = gl.constexpr(flat(words_layout(1, 16)))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _HALF_LAYOUT))


@gluon.jit
def _take(slot, LAYOUT: gl.constexpr):
    """Load the words of a slot of the ring into registers."""
    WORDS: gl.constexpr = slot.shape[1] // 2
    return wait_loads((as_words(slot).load(LAYOUT),), 2 * WORDS // THREADS)[0]


@gluon.jit
def _cast(words, tile, keep):
    keep = gl.convert_layout(keep, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    words_of(tile).store(e4m3.to_float16(words, keep))


@gluon.jit
def _cast_half(args, tile, rope_tile, half, keep, NUMBER: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Cast half ``half``, which is half NUMBER of its step. ``keep`` [64]: -1 for existing keys, else 0."""
    tiles, slot = args.tiles, half % SLOTS
    mbarrier.wait(tiles.ring_full.index(slot), (half // SLOTS) & 1)
    words = _take(tiles.ring.index(slot), _HALF_LAYOUT)
    if HAS_ROPE:
        rope = _take(tiles.ring_ropes.index(half // 2 % 2), _ROPE_LAYOUT)
    barriers.arrive_at(SLOT_EMPTY + slot, SLOT_BARRIER_THREADS)
    barriers.wait(TILE_EMPTY + NUMBER, TILE_BARRIER_THREADS)
    _cast(words, tile, keep)
    if HAS_ROPE:
        _cast(rope, rope_tile, keep)
    fence_async_shared()
    barriers.arrive(TILE_FULL + NUMBER, TILE_BARRIER_THREADS)


@gluon.jit
def cast(args, CONFIG: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        barriers.arrive(SLOT_EMPTY + slot, SLOT_BARRIER_THREADS)
    k0, k1 = args.tiles.k0, args.tiles.k1
    cta_range = args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    half = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        # See ``producer.load_in_order``.
        if split.end > split.begin:
            for step in range(split.begin, split.end):
                left = split.length - step * STEP_KEYS - gl.arange(0, KEYS, _TOKENS)
                keep = gl.where(left > 0, -1, 0)
                _cast_half(args, k0.left, k0.rope, half, keep, 0, False)
                _cast_half(args, k0.right, k0.rope, half + 1, keep, 1, CONFIG.has_rope)
                keep = gl.where(left > KEYS, -1, 0)
                _cast_half(args, k1.left, k1.rope, half + 2, keep, 2, False)
                _cast_half(args, k1.right, k1.rope, half + 3, keep, 3, CONFIG.has_rope)
                half += 4
        length = device.key_count(item + 1, args.key_lengths)
    if args.results.scratch is not None:
        schedule.write_metadata(args.results.scratch, args.work, CONFIG)
    for number in gl.static_range(4):
        barriers.wait(TILE_EMPTY + number, TILE_BARRIER_THREADS)
    gdc_launch_dependents()
