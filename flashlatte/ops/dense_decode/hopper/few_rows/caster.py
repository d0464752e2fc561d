"""The caster: four warps that make tiles of float16 of what comes by the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.ptx import e4m3
from flashlatte.kernels.hopper.ptx.registers import loaded
from flashlatte.kernels.hopper.word_layouts import THREADS, as_words, flat, words_layout, words_of
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import (
    SLOT_EMPTY,
    SLOT_MEETING,
    SLOTS,
    TILE_EMPTY,
    TILE_FULL,
    TILE_MEETING,
)
from flashlatte.ops.dense_decode.hopper.tiles import PAIR
from flashlatte.split_kv import device

_HALF_LAYOUT = gl.constexpr(flat(words_layout(4, 16)))
_ROPE_LAYOUT = gl.constexpr(flat(words_layout(1, 16)))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _HALF_LAYOUT))


@gluon.jit
def _take(slot, LAYOUT: gl.constexpr):
    """Words of a slot of the ring, once they are in registers."""
    WORDS: gl.constexpr = slot.shape[1] // 2
    return loaded((as_words(slot).load(LAYOUT),), 2 * WORDS // THREADS)[0]


@gluon.jit
def _cast(words, tile, keep):
    keep = gl.convert_layout(keep, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
    words_of(tile).store(e4m3.to_float16(words, keep))


@gluon.jit
def _cast_half(call, tile, rope_tile, half, keep, NUMBER: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Cast half number ``half``, which is number NUMBER of its step; ``keep`` [64] is -1 for keys there are, else 0."""
    tiles, slot = call.tiles, half % SLOTS
    mbarrier.wait(tiles.ring_full.index(slot), (half // SLOTS) & 1)
    words = _take(tiles.ring.index(slot), _HALF_LAYOUT)
    if HAS_ROPE:
        rope = _take(tiles.ring_ropes.index(half // 2 % 2), _ROPE_LAYOUT)
    barriers.arrive_at(SLOT_EMPTY + slot, SLOT_MEETING)
    barriers.wait(TILE_EMPTY + NUMBER, TILE_MEETING)
    _cast(words, tile, keep)
    if HAS_ROPE:
        _cast(rope, rope_tile, keep)
    fence_async_shared()
    barriers.arrive(TILE_FULL + NUMBER, TILE_MEETING)


@gluon.jit
def cast(call, PLAN: gl.constexpr):
    for slot in gl.static_range(SLOTS):
        barriers.arrive(SLOT_EMPTY + slot, SLOT_MEETING)
    k0, k1 = call.tiles.k0, call.tiles.k1
    cta_range = call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    half = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        cost += PLAN.overhead + split.steps
        # As in ``loader.load``.
        if split.end > split.begin:
            for step in range(split.begin, split.end):
                left = split.length - step * PAIR - gl.arange(0, KEYS, _TOKENS)
                keep = gl.where(left > 0, -1, 0)
                _cast_half(call, k0.left, k0.rope, half, keep, 0, False)
                _cast_half(call, k0.right, k0.rope, half + 1, keep, 1, PLAN.has_rope)
                keep = gl.where(left > KEYS, -1, 0)
                _cast_half(call, k1.left, k1.rope, half + 2, keep, 2, False)
                _cast_half(call, k1.right, k1.rope, half + 3, keep, 3, PLAN.has_rope)
                half += 4
        length = device.key_count(item + 1, call.key_lengths)
    if call.results.scratch is not None:
        schedule.write_metadata(call.results.scratch, call.work, PLAN)
    for number in gl.static_range(4):
        barriers.wait(TILE_EMPTY + number, TILE_MEETING)
    gdc_launch_dependents()
