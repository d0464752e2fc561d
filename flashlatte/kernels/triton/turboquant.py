"""TurboQuant's rotation and the decoding of its codes, in Triton. ``kv_cache.turboquant`` defines the format."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words
from flashlatte.kernels.triton.cache_layout import alignment_bytes
from flashlatte.kv_cache.lloyd_max import lloyd_max
from flashlatte.kv_cache.turboquant import TurboQuantFormat
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.strides import stride_in_use


class RecordForm(NamedTuple):
    """The constants of a format's records.

    Attributes:
        head_dim, key_bits, value_bits, norm_offset, value_offset, scale_offset: as in the format.
        codebook: positive centroids.
        align: alignment of all strides of the cache, in bytes.
        native: the GPU has e4m3 conversion instructions.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    norm_offset: int
    value_offset: int
    scale_offset: int
    codebook: tuple[float, ...]
    align: int
    native: bool


class RecordCache(NamedTuple):
    """A cache of records [pages, page_size, h_kv]; strides are in units of ``RecordForm.align`` bytes."""

    start: Pointer
    stride_page: Int64
    stride_token: Int64
    stride_head: Int64


def records_of(
    cache: torch.Tensor, layout: TurboQuantFormat, max_align: int, *, native: bool
) -> tuple[RecordCache, RecordForm]:
    """A cache [pages, page_size, h_kv, record_bytes], and the constants of its records."""
    strides = [stride_in_use(cache, axis) for axis in range(3)]
    align = min(alignment_bytes(cache, *strides), max_align)
    codebook = lloyd_max(layout.key_bits) if layout.rotates else ()
    form = RecordForm(
        head_dim=layout.head_dim,
        key_bits=layout.key_bits,
        value_bits=layout.value_bits,
        norm_offset=layout.norm_offset,
        value_offset=layout.value_offset,
        scale_offset=layout.scale_offset,
        codebook=codebook[len(codebook) // 2 :],
        align=align,
        native=native,
    )
    return RecordCache(cache, *(stride // align for stride in strides)), form


@triton.jit
def hadamard(D: tl.constexpr, dtype: tl.constexpr):
    """Sylvester's Hadamard matrix [D, D] of 1 and -1, from the parity of the common bits of row and column."""
    index = tl.arange(0, D)
    return (1 - 2 * parity(index[:, None] & index[None, :])).to(dtype)


@triton.jit
def parity(bits):
    """1 where an odd number of the lower 16 bits are set, else 0."""
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return bits & 1


@triton.jit
def load_codes(row, mask, D: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr):
    """Load int32 codes [rows, D] at the byte addresses ``row`` [rows], multiples of ALIGN; 0 where not ``mask``
    [rows]."""
    # [rows, D / 8], of 8 codes each
    group = tl.arange(0, D // 8)[None, :]
    if BITS == 4 and ALIGN >= 4:
        word = load_words(row[:, None], group, tl.uint32, mask[:, None], ALIGN)
    elif BITS == 4:
        word = load_words(row[:, None], group * 2, tl.uint16, mask[:, None], ALIGN).to(tl.uint32)
        word |= load_words(row[:, None], group * 2 + 1, tl.uint16, mask[:, None], ALIGN).to(tl.uint32) << 16
    else:
        first = row[:, None] + group * BITS
        word = tl.load(first, mask=mask[:, None], other=0).to(tl.uint32)
        for byte in tl.static_range(1, BITS):
            word |= tl.load(first + byte, mask=mask[:, None], other=0).to(tl.uint32) << (8 * byte)
    # Join instead of broadcast: each thread keeps all codes of the words that it loaded.
    codes = tl.join(word, word >> (4 * BITS))
    codes = tl.join(codes, codes >> (2 * BITS))
    codes = tl.join(codes, codes >> BITS) & ((1 << BITS) - 1)
    return tl.reshape(codes, [row.shape[0], D]).to(tl.int32, bitcast=True)


@triton.jit
def centroids_of(codes, CODEBOOK: tl.constexpr):
    """float32 centroids of int32 codes. CODEBOOK: the positive centroids, ascending; code 0 is the lowest of all
    centroids."""
    HALF: tl.constexpr = len(CODEBOOK)
    is_positive = codes >= HALF
    # Codes HALF + i and HALF - 1 - i both map to offset i.
    offset = codes ^ tl.where(is_positive, HALF, HALF - 1)
    first, second = (offset & 1) != 0, (offset & 2) != 0
    magnitude = _select_of_4(first, second, CODEBOOK[0], CODEBOOK[1], CODEBOOK[2], CODEBOOK[3])
    if HALF == 8:
        upper = _select_of_4(first, second, CODEBOOK[4], CODEBOOK[5], CODEBOOK[6], CODEBOOK[7])
        magnitude = tl.where((offset & 4) != 0, upper, magnitude)
    return tl.where(is_positive, magnitude, -magnitude)


@triton.jit
def _select_of_4(first, second, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """One of four float32 constants, selected by two bits of the index, ``first`` the lower one."""
    return tl.where(second, tl.where(first, D, C), tl.where(first, B, A))


@triton.jit
def load_half(address, mask, ALIGN: tl.constexpr):
    """Load fp16 at byte addresses, multiples of ALIGN, as float32; 0 where not ``mask``."""
    return load_words(address, 0, tl.uint16, mask, ALIGN).to(tl.float16, bitcast=True).to(tl.float32)
