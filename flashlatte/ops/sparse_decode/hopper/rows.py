"""The selected rows of a work item: loads of indices, addresses, and copies to shared memory.

Shared by the producers for one CTA and for two CTAs of a cluster.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.clusters import OWN_TOKENS
from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.word_layouts import words_of
from flashlatte.ops.sparse_decode.hopper import schedule
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, V41, V41_FP4, halves_copied
from flashlatte.runtime.gluon_compat import cp_async
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer

# Bytes of a token's scales in model1, which follow the tokens of a page.
_MODEL1_SCALES = gl.constexpr(8)
# Offsets in words within a token: of its scales (v32, v41; v41_fp4) and of its rope.
SCALES = gl.constexpr(512 // 4)
FP4_SCALES = gl.constexpr(256 // 4)
V32_ROPE = gl.constexpr(528 // 4)
MODEL1_ROPE = gl.constexpr(448 // 4)
PLAIN_ROPE = gl.constexpr(1024 // 4)


@gluon.constexpr_function
def token_bytes(FORMAT, HAS_ROPE):
    """Bytes between tokens of a format with scales. HAS_ROPE: of ``V32``, whether tokens have rope values."""
    sizes = {V32.value: 656 if HAS_ROPE else 528, MODEL1.value: 576, V41.value: 528, V41_FP4.value: 288}
    return sizes[int(FORMAT)]


@gluon.constexpr_function
def copy_layout(WIDTH, IS_PLAIN):
    """Layout of words [64, WIDTH] for 16-byte copies.

    For caches with scales, a thread holds the same tokens as in ``words_layout``. For other caches, eight threads copy
    128 bytes of a token, in different banks.
    """
    more = [[0, 32], [0, 64]] if WIDTH == 128 else []
    if IS_PLAIN:
        reg_bases = [[0, 1], [0, 2], [16, 0], *more]
        lane_bases = [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]]
        warp_bases = [[4, 0], [8, 0], [32, 0]]
    else:
        reg_bases = [[0, 1], [0, 2], [0, 16], *more, [32, 0]]
        lane_bases = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
        warp_bases = [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, block_bases=[], shape=[64, WIDTH])


@gluon.constexpr_function
def tokens_layout(IS_PLAIN):
    return gl.SliceLayout(1, copy_layout(32, IS_PLAIN))


class CacheSelection(NamedTuple):
    """A cache, its address parameters, and the lists of indices that select its tokens.

    Attributes:
        k_cache: after ``in_bytes`` a pointer to bytes.
        page_stride, token_stride: in bytes.
        num_slots: tokens of the cache; indices from num_slots on are invalid.
        page_size: tokens of a page.
        page_magic, page_shift: slot // page_size = (2 · slot · page_magic) >> 32 >> page_shift.
        indices: lists at [request · indices_stride_request + token · indices_stride_token].
    """

    k_cache: Pointer
    page_stride: Int32
    token_stride: Int32
    num_slots: Int32
    page_size: Int32
    page_magic: Int64
    page_shift: Int32
    indices: ElementPointer
    indices_stride_request: Int64
    indices_stride_token: Int64


class SelectedRows(NamedTuple):
    """Tokens of a block: pointers to their words, pointers to their scales (only model1), and which are selected. Also
    used for the heads of a query, where existing heads are valid."""

    words: Any
    scales: Any
    valid: Any


@gluon.jit
def in_bytes(selection):
    """The same selection with a pointer to the cache's bytes."""
    return CacheSelection(
        selection.k_cache.to(gl.pointer_type(gl.int8), bitcast=True),
        selection.page_stride,
        selection.token_stride,
        selection.num_slots,
        selection.page_size,
        selection.page_magic,
        selection.page_shift,
        selection.indices,
        selection.indices_stride_request,
        selection.indices_stride_token,
    )


@gluon.jit
def _list_of(selection, item, key_lengths):
    """Pointer to the list of indices of an item."""
    # After the last item nothing is loaded, but the address must be valid.
    item = gl.minimum(item, key_lengths.num_items - 1)
    request = (item // key_lengths.tokens).to(gl.int64)
    token = (item % key_lengths.tokens).to(gl.int64)
    return selection.indices + request * selection.indices_stride_request + token * selection.indices_stride_token


@gluon.jit
def load_indices(cursor, block, args, CONFIG: gl.constexpr):
    """Load indices [64] of a block; -1 after the end of the list or split. In a cluster, each CTA puts its own half
    first."""
    token = gl.arange(0, KEYS, tokens_layout(CONFIG.format == PLAIN))
    rotation = 0
    if CONFIG.cluster:
        rotation = args.work.group % 2 * OWN_TOKENS
    split, row = cursor.split, cursor.row
    first = block * KEYS
    length = split.length
    if args.extra is not None:
        is_extra = block >= split.own
        row = gl.where(is_extra, cursor.extra_row, row)
        first = gl.where(is_extra, first - split.own * KEYS, first)
        length = gl.where(is_extra, split.extra_length, length)
    length = gl.where(block < split.end, length, 0)
    # A block begins at a multiple of 64. (token ^ rotation would be kept in registers.)
    position = (first ^ rotation) ^ token
    return gl.load(row + position, mask=position < length, other=-1)


@gluon.jit
def locate(indices, block, split, args, CONFIG: gl.constexpr):
    """Addresses of a block's tokens. Indices outside of the cache give token 0, and are not valid."""
    if args.extra is not None:
        if block >= split.own:  # noqa: SIM108
            rows = _locate(indices, args.extra, CONFIG)
        else:
            rows = _locate(indices, args.own, CONFIG)
        return rows
    else:
        return _locate(indices, args.own, CONFIG)


@gluon.jit
def _times(count, stride):
    return count.to(gl.int64) * stride


@gluon.jit
def _words(pointers, CONFIG: gl.constexpr):
    ALIGNMENT: gl.constexpr = CONFIG.alignment
    return gl.multiple_of(pointers.to(gl.pointer_type(gl.int32), bitcast=True), [ALIGNMENT])


@gluon.jit
def _locate(indices, cache, CONFIG: gl.constexpr):
    valid = (indices >= 0) & (indices < cache.num_slots)
    slot = gl.where(valid, indices, 0).to(gl.int32)
    token_stride = (
        cache.token_stride.to(gl.int64) if CONFIG.format == PLAIN else token_bytes(CONFIG.format, CONFIG.has_rope)
    )
    if CONFIG.flat:
        words = cache.k_cache + _times(slot, token_stride)
        return SelectedRows(_words(words, CONFIG), slot, valid)
    else:
        page = (gl.umulhi((slot * 2).to(gl.uint32), cache.page_magic.to(gl.uint32)) >> cache.page_shift).to(gl.int32)
        in_page = slot - page * cache.page_size
        page_start = cache.k_cache + _times(page, cache.page_stride.to(gl.int64))
        scales = slot
        if CONFIG.format == MODEL1:
            scales = page_start + _times(cache.page_size, token_bytes(MODEL1, False)) + _times(in_page, _MODEL1_SCALES)
            scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
        return SelectedRows(_words(page_start + _times(in_page, token_stride), CONFIG), scales, valid)


class Cursor(NamedTuple):
    """The cost at which a work item begins, the CTA's split of it, and pointers to its lists of indices."""

    cost: Any
    split: Any
    row: Any
    extra_row: Any


@gluon.jit
def cursor_at(item, cost, args, CONFIG: gl.constexpr):
    split = schedule.split_of(item, cost, args.work, args.key_lengths, CONFIG)
    row = _list_of(args.own, item, args.key_lengths)
    extra_row = row
    if args.extra is not None:
        extra_row = _list_of(args.extra, item, args.key_lengths)
    return Cursor(cost, split, row, extra_row)


@gluon.jit
def arrive_full(FULL: gl.constexpr, CONFIG: gl.constexpr):
    barriers.arrive(FULL, 128 + CONFIG.producer_threads, CONFIG.producer_threads)


@gluon.jit
def copy_words(tile, rows, FIRST: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr, IS_PLAIN: gl.constexpr):
    """Copy WIDTH words from word FIRST of 64 rows to word COLUMN of a tile (cp.async); 0 where a row is not valid.

    IS_PLAIN: the copy is by the eight warps of a producer that only copies, instead of four warps.
    """
    LAYOUT: gl.constexpr = copy_layout(WIDTH, IS_PLAIN)
    target = words_of(tile)
    if target.shape[1] != WIDTH:
        target = target.slice(COLUMN, WIDTH, dim=1)
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    words = gl.convert_layout(rows.words, tokens, assert_trivial=True)[:, None]
    valid = gl.convert_layout(rows.valid, tokens, assert_trivial=True)[:, None]
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    pointers, mask = gl.broadcast(words + column[None, :], valid)
    cp_async(target, pointers, mask=mask)


@gluon.jit
def copy_rope(k, full, rows, CONFIG: gl.constexpr):
    """Copy the bf16 part, if any, of tokens of a format with scales; it completes on the barrier of the right half."""
    if CONFIG.format == V32 and CONFIG.has_rope:
        copy_words(k.rope, rows, V32_ROPE, 0, 32, False)
    elif CONFIG.format == MODEL1:
        copy_words(k.right, rows, MODEL1_ROPE, 96, 32, False)
    if halves_copied(CONFIG.format, CONFIG.has_rope) > 0:
        async_copy.mbarrier_arrive(full.right, increment_count=False)


@gluon.jit
def publish_mask(mask, rows):
    mask.store(rows.valid.to(gl.int32))
