"""TurboQuant caches: keys and values of grouped-query attention in 3 to 8 bits a number, in vLLM's four presets.

A token's head is one record: the key's codes and norm, the value's codes, scale and minimum. A key is divided by its
norm and rotated by a Hadamard matrix; its numbers are then nearly normal with variance 1 / d, whatever channels stood
out, and each is given the nearest centroid of the Lloyd-Max codebook for that distribution. What is read back is
stretched to the length of the norm ("nc"). A value is stored as it is, in equal steps from its minimum to its maximum.
(TurboQuant, arXiv:2504.19874, without its residual sketch; the bytes are those of vLLM's ``turboquant_*`` caches.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.kv_cache import allocation
from flashlatte.kv_cache.fp8 import as_bytes, divide, from_bytes, to_e4m3
from flashlatte.kv_cache.hadamard import hadamard
from flashlatte.kv_cache.lloyd_max import lloyd_max, midpoints
from flashlatte.runtime import checks

# Bits of a key's number and of a value's; keys of 8 bits are e4m3, neither rotated nor scaled.
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
# What is added to a norm before it divides, and to a square of one before its root is taken.
NORM_EPSILON, SQUARE_EPSILON = 1e-8, 1e-16
# Heads of a new cache begin at multiples of so many bytes, for kernels to read words.
_HEAD_ALIGNMENT = 8


@dataclass(frozen=True)
class TurboQuantFormat:
    """A preset for heads of ``head_dim`` numbers.

    Attributes:
        name: the preset's.
        key_bits: 3 or 4, codes of a codebook, or 8, e4m3.
        value_bits: 3 or 4.
        head_dim: numbers of a key, and of a value; a power of two from 16 to 512.
    """

    name: str
    key_bits: int
    value_bits: int
    head_dim: int

    @property
    def rotates(self) -> bool:
        """Whether keys are stored as rotated unit vectors beside their norm."""
        return self.key_bits < 8

    @property
    def norm_offset(self) -> int:
        """Bytes of a key's codes, behind which its fp16 norm lies if it has one."""
        return self.head_dim * self.key_bits // 8

    @property
    def value_offset(self) -> int:
        """Where a value's codes begin."""
        return self.norm_offset + (2 if self.rotates else 0)

    @property
    def scale_offset(self) -> int:
        """Where a value's scale and its minimum lie, both fp16."""
        return self.value_offset + self.head_dim * self.value_bits // 8

    @property
    def record_bytes(self) -> int:
        """The last dimension of a cache."""
        return self.scale_offset + 4

    @property
    def allocated_bytes(self) -> int:
        """From head to head in a cache that ``allocate`` makes."""
        return -(-self.record_bytes // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Records uint8 [..., record_bytes] of keys and values [..., head_dim].

        Norms, scales and minima beyond fp16 saturate; those of a row with a NaN or an infinity are NaN.
        """
        of_key = self._encode_key(key.float()) if self.rotates else (as_bytes(to_e4m3(key.float())),)
        return torch.cat((*of_key, *self._encode_value(value.float())), dim=-1)

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 keys and values [..., head_dim] of records."""
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
        return pack_codes(codes, self.key_bits), _half_bytes(norm)

    def _encode_value(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = 2**self.value_bits - 1
        minimum = value.amin(dim=-1, keepdim=True)
        # Numbers of bf16 often lie half way between two steps: only the exact quotient gives one code everywhere.
        scale = divide(value.amax(dim=-1, keepdim=True) - minimum, largest).clamp_min(SMALLEST_VALUE_SCALE)
        codes = ((value - minimum) / scale + 0.5).floor().nan_to_num().clamp(0, largest)
        finite = value.isfinite().all(dim=-1, keepdim=True)
        halves = [_half_bytes(torch.where(finite, x, torch.nan)) for x in (scale, minimum)]
        return pack_codes(codes, self.value_bits), *halves


def turboquant_format(name: str, head_dim: int) -> TurboQuantFormat:
    """The preset of this name.

    Raises:
        ValueError: an unknown name, or a head_dim that is no power of two from 16 to 512.
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
    """A zeroed TurboQuant cache, whose heads begin at multiples of 8 bytes, as kernels read it best.

    Args:
        cache_format: one of ``TURBOQUANT_NAMES``.
        num_pages, page_size: pages, and tokens of each.
        h_kv: key heads.
        head_dim: numbers of a key and of a value, a power of two from 16 to 512.
        device: where; torch's default device if None.

    Returns:
        uint8 [num_pages, page_size, h_kv, record_bytes]; head_dim 128 has 196 (k8v4), 134 (4bit_nc), 118 (k3v4_nc) or
        102 (3bit_nc) bytes. Its heads lie up to 6 bytes apart.

    Raises:
        TypeError, ValueError: an unknown format, a size below 1, or a head_dim that the format does not have.
        torch.OutOfMemoryError: the device has no room; the message gives pages and GiB.
    """
    layout = turboquant_format(cache_format, checks.positive_int("head_dim", head_dim))
    shape = [
        checks.positive_int(name, size)
        for name, size in (("num_pages", num_pages), ("page_size", page_size), ("h_kv", h_kv))
    ]
    whole = (*shape, layout.allocated_bytes)
    place = checks.device("device", device)
    storage = allocation.zeros(whole, torch.uint8, place, num_pages, page_size, layout.name)
    return storage[..., : layout.record_bytes]


def as_turboquant_cache(
    cache: object, cache_format: str | None, head_dim: int, h_kv: int | None = None
) -> TurboQuantFormat:
    """Check a cache [pages, page_size, h_kv, record_bytes]; its format, given or told by the width of a record."""
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
    widths = checks.either(f"{layout.record_bytes} ({layout.name})" for layout in formats)
    raise ValueError(f"cache must be {widths} wide for head dim {head_dim}, got {width}")


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., n] below 2^bits as bytes [..., n · bits / 8], the lowest bit of the first code first."""
    each = codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1
    byte_bits = each.flatten(-2).unflatten(-1, (-1, 8)) << torch.arange(8, device=codes.device)
    return byte_bits.sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes int32 [..., n] of bytes [..., n · bits / 8]."""
    each = packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device) & 1
    code_bits = each.flatten(-2).unflatten(-1, (-1, bits)) << torch.arange(bits, device=packed.device)
    return code_bits.sum(dim=-1, dtype=torch.int32)


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    saturated = torch.where(x.isfinite(), x.clamp(-LARGEST_HALF, LARGEST_HALF), torch.nan)
    # Of an axis of one entry PyTorch keeps any stride, which a view in another dtype may refuse.
    return saturated.to(torch.float16, memory_format=torch.contiguous_format).view(torch.uint8)


def _halves(records: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of n fp16 [..., 2n]."""
    return records.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
