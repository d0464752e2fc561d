"""TurboQuant caches: keys and values of grouped-query attention in 3 to 8 bits per element, in vLLM's four presets.

A record stores one head of a token: the key's codes and norm, and the value's codes, scale and minimum. A key is
divided by its norm and rotated by a Hadamard matrix. Its elements are then approximately normal with variance 1 / d,
even if the key has outlier channels, and each is quantized to the nearest centroid of the Lloyd-Max codebook for this
distribution. A dequantized key is rescaled to its norm ("norm correction", nc). A value is quantized uniformly between
its minimum and maximum, without a rotation. Source: TurboQuant, arXiv:2504.19874, without its residual sketch; the
layout is that of vLLM's ``turboquant_*`` caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache import allocation
from flashlatte.kv_cache.fp8 import as_bytes, divide, from_bytes, to_e4m3
from flashlatte.kv_cache.hadamard import hadamard
from flashlatte.kv_cache.lloyd_max import lloyd_max, midpoints
from flashlatte.runtime import checks

# Bits of a key element and of a value element; keys of 8 bits are e4m3, neither rotated nor scaled.
_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
TURBOQUANT_NAMES = tuple(_BITS)
HEAD_DIMS = (16, 32, 64, 128, 256, 512)

LARGEST_HALF = 65504.0
SMALLEST_VALUE_SCALE = 1e-8
# Added to a norm before dividing by it, and to a squared norm before its square root.
NORM_EPSILON, SQUARE_EPSILON = 1e-8, 1e-16
# Alignment, in bytes, of the heads of an allocated cache, so that kernels can read words.
_HEAD_ALIGNMENT = 8


@dataclass(frozen=True)
class TurboQuantFormat:
    """A preset for heads of ``head_dim`` elements.

    Attributes:
        name: the preset's name.
        key_bits: 3 or 4 for codes of a codebook, 8 for e4m3.
        value_bits: 3 or 4.
        head_dim: elements of a key and of a value; a power of two from 16 to 512.
    """

    name: str
    key_bits: int
    value_bits: int
    head_dim: int

    @property
    def rotates(self) -> bool:
        """Whether keys are stored as rotated unit vectors with a norm."""
        return self.key_bits < 8

    @property
    def norm_offset(self) -> int:
        """Byte offset of the key's fp16 norm, if it has one; the number of bytes of the key's codes."""
        return self.head_dim * self.key_bits // 8

    @property
    def value_offset(self) -> int:
        """Byte offset of the value's codes."""
        return self.norm_offset + (2 if self.rotates else 0)

    @property
    def scale_offset(self) -> int:
        """Byte offset of the value's scale and minimum, both fp16."""
        return self.value_offset + self.head_dim * self.value_bits // 8

    @property
    def record_bytes(self) -> int:
        """The last dimension of a cache."""
        return self.scale_offset + 4

    @property
    def allocated_bytes(self) -> int:
        """Head stride, in bytes, of a cache from ``allocate``."""
        return -(-self.record_bytes // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Quantize keys and values [..., head_dim] to records uint8 [..., record_bytes].

        Norms, scales and minima beyond the range of fp16 saturate; those of a row with a NaN or an infinity are NaN, as
        is a norm whose square overflows float32.
        """
        key_parts = self._encode_key(key.float()) if self.rotates else (as_bytes(to_e4m3(key.float())),)
        return torch.cat((*key_parts, *self._encode_value(value.float())), dim=-1)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize records to float32 keys and values [..., head_dim]."""
        codes = records[..., : self.norm_offset]
        if not self.rotates:
            key = from_bytes(codes, torch.float8_e4m3fn).float()
        else:
            centroids = torch.tensor(lloyd_max(self.key_bits), dtype=torch.float32, device=records.device)
            rotated = centroids[unpack_codes(codes, self.key_bits).long()]
            unit = rotated / (rotated.square().sum(dim=-1, keepdim=True) + SQUARE_EPSILON).sqrt()
            norm = _halves(records[..., self.norm_offset : self.value_offset])
            key = norm * (unit @ hadamard(self.head_dim, records.device))
        steps = unpack_codes(records[..., self.value_offset : self.scale_offset], self.value_bits).float()
        scale, minimum = _halves(records[..., self.scale_offset :]).split(1, dim=-1)
        return key, steps * scale + minimum

    def _encode_key(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = key.square().sum(dim=-1, keepdim=True).sqrt()
        rotated = (key / (norm + NORM_EPSILON)) @ hadamard(self.head_dim, key.device)
        cells = torch.tensor(midpoints(self.key_bits), dtype=torch.float32, device=key.device) * self.head_dim**-0.5
        codes = torch.bucketize(rotated.contiguous(), cells, right=True)
        return pack_codes(codes, self.key_bits), _half_bytes(torch.where(norm.isfinite(), norm, torch.nan))

    def _encode_value(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = 2**self.value_bits - 1
        minimum = value.amin(dim=-1, keepdim=True)
        # bf16 values are often halfway between two codes: all implementations must compute the exact quotient to agree.
        scale = divide(value.amax(dim=-1, keepdim=True) - minimum, largest).clamp_min(SMALLEST_VALUE_SCALE)
        codes = ((value - minimum) / scale + 0.5).floor().nan_to_num().clamp(0, largest)
        finite = value.isfinite().all(dim=-1, keepdim=True)
        halves = [_half_bytes(torch.where(finite, x, torch.nan)) for x in (scale, minimum)]
        return pack_codes(codes, self.value_bits), *halves


def turboquant_format(name: str, head_dim: int) -> TurboQuantFormat:
    """The preset of this name.

    Raises:
        ValueError: an unknown name, or a head_dim that is not a power of two from 16 to 512.
    """
    checks.choice("cache_format", name, TURBOQUANT_NAMES)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be a power of two from 16 to 512 for {name}, got {head_dim}")
    return TurboQuantFormat(name, *_BITS[name], head_dim)


def allocate(
    cache_format: str,
    num_pages: int,
    page_size: int,
    h_kv: int,
    head_dim: int,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A zeroed TurboQuant cache, with heads aligned to 8 bytes, which kernels read fastest.

    Args:
        cache_format: one of ``TURBOQUANT_NAMES``.
        num_pages, page_size: number of pages, and tokens per page.
        h_kv: key heads.
        head_dim: elements of a key and of a value, a power of two from 16 to 512.
        device: torch's default device if None.

    Returns:
        uint8 [num_pages, page_size, h_kv, record_bytes]. With head_dim 128 a record has 196 (k8v4), 134 (4bit_nc), 118
        (k3v4_nc) or 102 (3bit_nc) bytes. Heads are separated by gaps of up to 6 bytes.

    Raises:
        TypeError, ValueError: an unknown format, a size below 1, or an unsupported head_dim.
        torch.OutOfMemoryError: the device has too little memory; the message gives pages and GiB.
    """
    layout = turboquant_format(cache_format, checks.positive_int("head_dim", head_dim))
    shape = [
        checks.positive_int(name, size)
        for name, size in (("num_pages", num_pages), ("page_size", page_size), ("h_kv", h_kv))
    ]
    whole = (*shape, layout.allocated_bytes)
    storage = allocation.zeros(whole, torch.uint8, checks.device("device", device), num_pages, page_size, layout.name)
    return storage[..., : layout.record_bytes]


def as_turboquant_cache(
    cache: object, cache_format: str | None, head_dim: int, h_kv: int | None = None
) -> TurboQuantFormat:
    """Check a cache [pages, page_size, h_kv, record_bytes]; returns its format, given or inferred from its width."""
    shape = ("pages", "page_size", "h_kv" if h_kv is None else h_kv, "record_bytes")
    width = checks.tensor("cache", cache, shape, (torch.uint8,)).shape[3]
    if cache_format is not None:
        layout = turboquant_format(cache_format, head_dim)
        if width != layout.record_bytes:
            raise ValueError(
                f"cache of format {cache_format} must be {layout.record_bytes} wide for head dim {head_dim}, "
                f"got {width}"
            )
        return layout
    formats = [turboquant_format(known, head_dim) for known in TURBOQUANT_NAMES]
    for layout in formats:
        if layout.record_bytes == width:
            return layout
    widths = checks.join_or(f"{layout.record_bytes} ({layout.name})" for layout in formats)
    raise ValueError(f"cache must be {widths} wide for head dim {head_dim}, got {width}")


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [..., n] below 2^bits into bytes [..., n · bits / 8], least significant bits first."""
    each = codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1
    byte_bits = each.flatten(-2).unflatten(-1, (-1, 8)) << torch.arange(8, device=codes.device)
    return byte_bits.sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes [..., n · bits / 8] to codes int32 [..., n]."""
    each = packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device) & 1
    code_bits = each.flatten(-2).unflatten(-1, (-1, bits)) << torch.arange(bits, device=packed.device)
    return code_bits.sum(dim=-1, dtype=torch.int32)


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    saturated = x.clamp(-LARGEST_HALF, LARGEST_HALF)
    # An axis of size 1 may have any stride, with which view(dtype) may fail.
    return saturated.to(torch.float16, memory_format=torch.contiguous_format).view(torch.uint8)


def _halves(records: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] from the bytes of n fp16 values, [..., 2n]."""
    return records.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
