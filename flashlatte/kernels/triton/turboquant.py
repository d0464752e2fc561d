"""TurboQuant's rotation, and its codes as numbers, in Triton. ``kv_cache.turboquant`` has the format."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words


@triton.jit
def hadamard(D: tl.constexpr, dtype: tl.constexpr):
    """Sylvester's Hadamard matrix [D, D] of 1 and -1: the parity of the bits that row and column share."""
    index = tl.arange(0, D)
    bits = index[:, None] & index[None, :]
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(dtype)


@triton.jit
def load_codes(row, mask, D: tl.constexpr, BITS: tl.constexpr):
    """int32 codes [rows, D] at byte addresses ``row`` [rows]; 0 where not ``mask`` [rows]."""
    # [rows, D / 8], of 8 codes each
    first = row[:, None] + (tl.arange(0, D // 8) * BITS)[None, :]
    word = tl.load(first, mask=mask[:, None], other=0).to(tl.int32)
    for byte in tl.static_range(1, BITS):
        word |= tl.load(first + byte, mask=mask[:, None], other=0).to(tl.int32) << (8 * byte)
    shifts = (tl.arange(0, 8) * BITS)[None, None, :]
    codes = (word[:, :, None] >> shifts) & ((1 << BITS) - 1)
    return tl.reshape(codes, [row.shape[0], D])


@triton.jit
def centroids_of(codes, CODEBOOK: tl.constexpr):
    """float32 centroids of int32 codes; CODEBOOK has those above 0, rising, and a code counts from the lowest."""
    HALF: tl.constexpr = len(CODEBOOK)
    is_positive = codes >= HALF
    place = tl.where(is_positive, codes - HALF, HALF - 1 - codes)
    magnitude = tl.full(codes.shape, CODEBOOK[0], tl.float32)
    for index in tl.static_range(1, HALF):
        magnitude = tl.where(place >= index, CODEBOOK[index], magnitude)
    return tl.where(is_positive, magnitude, -magnitude)


@triton.jit
def load_half(address, mask, ALIGN: tl.constexpr):
    """float32 of the fp16 at byte addresses, which are multiples of ALIGN; 0 where not ``mask``."""
    return load_words(address, 0, tl.uint16, mask, ALIGN).to(tl.float16, bitcast=True).to(tl.float32)
