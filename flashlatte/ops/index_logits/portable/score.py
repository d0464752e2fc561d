"""The loop over keys: it loads tiles of keys and scales, sums over heads, and stores logits.

The MMA is keys times queries, [BLOCK_N, queries · heads], so a thread sums over heads in its registers. A kernel
chooses queries and a range of positions, and passes a function that locates the keys at these positions.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words
from flashlatte.kernels.triton.cache_layout import as_bytes, row_alignment
from flashlatte.kernels.triton.fp4 import e2m1_to_float
from flashlatte.kernels.triton.fp8 import converts_e4m3, e4m3_to_float, e8m0_to_float, from_float32, to_float32
from flashlatte.kernels.triton.rows import HeadRows, TokenRows, head_row, head_rows, token_row, token_rows
from flashlatte.kv_cache import fp4
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.runtime import machine
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.strides import stride_in_use

ENCODINGS = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "e2m1"}


class IndexKeys(NamedTuple):
    """A cache of index keys; contiguous keys are one page.

    Attributes:
        start, page_stride: first page and stride between pages, in units of ``key_align`` elements.
        stride: stride between contiguous keys, in the same unit.
        scales, scale_stride: scales of contiguous keys. In a cache, scales follow the values of a page.
    """

    start: Pointer
    page_stride: Int64
    stride: Int64
    scales: Pointer
    scale_stride: Int64
    num_pages: Int64
    page_size: Int64


class ScoreConfig(NamedTuple):
    """The compile-time constants of the loop.

    Attributes:
        encoding: encoding of the keys.
        compute: the dtype of the MMA: "e4m3", "bf16" or "fp32".
        value_width, scale_bytes: bytes of a key's values and of its scale in a page; value_width is None if keys are
            contiguous.
        block_q, block_h, block_n: queries, their heads (padded), and keys of a tile.
    """

    head_dim: int
    encoding: str
    compute: str
    value_width: int | None
    scale_bytes: int
    key_align: int
    native: bool
    block_q: int
    block_h: int
    block_n: int


class Operand(NamedTuple):
    """An MMA operand [rows, D]; for e2m1 keys, two operands with the even and the odd columns."""

    even: Any
    odd: Any


class IndexQueryTile(NamedTuple):
    """Queries [BLOCK_Q · BLOCK_H, D], and half of their weights."""

    operand: Operand
    half_weights: Any


class KeyTile(NamedTuple):
    """The addresses of BLOCK_N keys and of their scales, and which of the keys exist."""

    keys: Any
    scales: Any
    exists: Any


def score_arguments(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None, blocks: tuple[int, int, int]
) -> tuple[tuple[HeadRows, TokenRows, IndexKeys], ScoreConfig]:
    """q [rows, H, D], weights [rows, H], and contiguous keys or a cache of four axes as records, and the constants.

    ``blocks``: block_q, block_h and block_n.
    """
    head_dim = q.shape[2]
    if k.dim() == 4:
        cache, layout = as_index_cache(k, head_dim)
        cache = as_bytes(cache)
        align, encoding = row_alignment(cache, 0), layout.encoding
        keys = IndexKeys(cache, stride_in_use(cache, 0) // align, 0, None, 0, *cache.shape[:2])
        value_width, scale_bytes = layout.planes[0].width, layout.scale_bytes
    else:
        align, encoding = row_alignment(k, 0), ENCODINGS[k.dtype]
        scale_stride = 0 if k_scale is None else stride_in_use(k_scale, 0)
        keys = IndexKeys(as_bytes(k), 0, stride_in_use(k, 0) // align, k_scale, scale_stride, 1, k.shape[0])
        value_width, scale_bytes = None, {"e4m3": 4, "e2m1": head_dim // fp4.TILE}.get(encoding, 0)
    config = ScoreConfig(
        head_dim,
        encoding,
        _compute_type(q, encoding),
        value_width,
        scale_bytes,
        align,
        converts_e4m3(q.device),
        *blocks,
    )
    return (head_rows(as_bytes(q)), token_rows(weights, align=1), keys), config


def _compute_type(q: torch.Tensor, encoding: str) -> str:
    """The dtype of the MMA: "e4m3" if the GPU supports it, else "bf16", or "fp32"."""
    if machine.interpreting() or encoding == "fp32":
        return "fp32"
    both_e4m3 = q.dtype == torch.float8_e4m3fn and encoding == "e4m3"
    return "e4m3" if both_e4m3 and converts_e4m3(q.device) else "bf16"


@triton.jit
def store_logits(begin, stop, source, queries, rows, LOCATE: tl.constexpr, CONFIG: tl.constexpr):
    """Store the logits of the keys at positions ``begin`` to ``stop`` to ``rows`` (``LogitRows``).

    LOCATE(source, positions [BLOCK_N], CONFIG) returns a ``KeyTile``. For a visible key that does not exist, -inf is
    stored if ``source.fills`` is set.
    """
    for first in range(begin, stop, CONFIG.block_n):
        position = first + tl.arange(0, CONFIG.block_n)
        tile = LOCATE(source, position, CONFIG)
        if CONFIG.encoding == "e4m3":  # before the MMA, so that its latency is hidden
            scale = load_scales(tile, CONFIG)
        keys = load_keys(tile, CONFIG)
        scores = head_sums(keys, queries, CONFIG)  # [BLOCK_N, BLOCK_Q]
        if CONFIG.encoding == "e4m3":
            scores *= scale[:, None]
        if source.fills:
            scores = tl.where(tile.exists[:, None], scores, float("-inf"))
        if rows.start is None:
            visible = position[:, None] < rows.end[None, :]
        else:
            visible = (position[:, None] >= rows.start[None, :]) & (position[:, None] < rows.end[None, :])
        value = from_float32(scores, rows.address.dtype.element_ty)
        tl.store(rows.address[None, :] + position[:, None], value, mask=visible)


@triton.jit
def tile_of_page(keys, page, page_size, slot, exists, CONFIG: tl.constexpr):
    """The keys at slots of pages, which begin at ``page``."""
    scales = page
    if CONFIG.value_width is None:
        values = page + slot * keys.stride * CONFIG.key_align
        if CONFIG.scale_bytes > 0:
            scales = keys.scales + slot * keys.scale_stride
    else:
        values = page + slot * CONFIG.value_width
        if CONFIG.scale_bytes > 0:
            scales = page + page_size * CONFIG.value_width + slot * CONFIG.scale_bytes
    return KeyTile(values, scales, exists)


@triton.jit
def as_operand(x, CONFIG: tl.constexpr):
    """Cast loaded values to the dtype of the MMA, exactly; uint8 values are e4m3 bits."""
    if x.dtype == tl.uint8:
        if CONFIG.compute == "e4m3":
            return x.to(tl.float8e4nv, bitcast=True)
        else:
            y = e4m3_to_float(x, CONFIG.native)
            return y if CONFIG.compute == "fp32" else y.to(tl.bfloat16)
    else:
        return to_float32(x) if CONFIG.compute == "fp32" and x.dtype != tl.float32 else x


@triton.jit
def load_queries(q, weights, row, head, inside, CONFIG: tl.constexpr):
    """Load rows (row, head) as an operand, and half of their weights; zeros where not ``inside``."""
    start = head_row(q, row, head)[:, None]
    mask = inside[:, None]
    if CONFIG.encoding == "e2m1":
        column = 2 * tl.arange(0, CONFIG.head_dim // 2)[None, :]
        even = as_operand(tl.load(start + column, mask=mask, other=0), CONFIG)
        odd = as_operand(tl.load(start + column + 1, mask=mask, other=0), CONFIG)
    else:
        even = as_operand(tl.load(start + tl.arange(0, CONFIG.head_dim)[None, :], mask=mask, other=0), CONFIG)
        odd = even
    weight = tl.load(token_row(weights, row) + head, mask=inside, other=0.0)
    return IndexQueryTile(Operand(even, odd), weight * 0.5)


@triton.jit
def load_keys(tile, CONFIG: tl.constexpr):
    """Load the keys of a tile; zeros for keys that do not exist."""
    mask = tile.exists[:, None]
    if CONFIG.encoding == "e2m1":
        byte = tl.arange(0, CONFIG.head_dim // 2)[None, :]
        packed = tl.load(tile.keys[:, None] + byte, mask=mask, other=0).to(tl.int32)
        scale = e8m0_to_float(tl.load(tile.scales[:, None] + byte // 16, mask=mask, other=0))
        even, odd = e2m1_to_float(packed & 0xF) * scale, e2m1_to_float(packed >> 4) * scale
        if CONFIG.compute == "bf16":
            even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    else:
        values = tl.load(tile.keys[:, None] + tl.arange(0, CONFIG.head_dim)[None, :], mask=mask, other=0)
        even = as_operand(values, CONFIG)
        odd = even
    return Operand(even, odd)


@triton.jit
def load_scales(tile, CONFIG: tl.constexpr):
    """Load the float32 scales of a tile."""
    if CONFIG.value_width is None:
        return tl.load(tile.scales, mask=tile.exists, other=0.0)
    else:
        return load_words(tile.scales, 0, tl.uint32, tile.exists, CONFIG.key_align).to(tl.float32, bitcast=True)


@triton.jit
def head_sums(keys, queries, CONFIG: tl.constexpr):
    """Σ_h weight · relu(q · k): [BLOCK_N, BLOCK_Q]."""
    PRECISION: tl.constexpr = "ieee" if CONFIG.compute == "fp32" else "tf32"
    products = tl.dot(keys.even, tl.trans(queries.operand.even), input_precision=PRECISION)
    if CONFIG.encoding == "e2m1":
        products = tl.dot(keys.odd, tl.trans(queries.operand.odd), products, input_precision=PRECISION)
    # 2 · relu(x) as x + |x|: GPUs compute a maximum at half the rate of an addition, and this propagates NaN.
    weighted = (products + tl.abs(products)) * queries.half_weights[None, :]
    if CONFIG.block_q == 1:
        return tl.sum(weighted, axis=1)[:, None]
    else:
        return tl.sum(tl.reshape(weighted, [CONFIG.block_n, CONFIG.block_q, CONFIG.block_h]), axis=2)
