"""What the launches of ``write`` and ``gather`` know of a format, and how they divide the work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

VECTOR_BYTES = 16
_ONE_BYTE = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class TiledLayout:
    """Byte layout of a token whose latent has a scale for each tile.

    Attributes:
        tile: latent values that share a scale.
        tiles: scales of a token.
        padded_tiles: ``tiles`` rounded up to a power of two, and the bytes of a token's E8M0 scales.
        row_bytes: from token to token in the plane that holds latent and rope.
        rope_offset: of the rope's bytes in that row.
        e8m0: scales are bytes in a plane of their own behind the page's tokens; else float32 behind the latent.
    """

    tile: int
    tiles: int
    padded_tiles: int
    row_bytes: int
    rope_offset: int
    e8m0: bool


TILED_LAYOUTS = {
    "v32": TiledLayout(tile=128, tiles=4, padded_tiles=4, row_bytes=656, rope_offset=528, e8m0=False),
    "model1": TiledLayout(tile=64, tiles=7, padded_tiles=8, row_bytes=576, rope_offset=448, e8m0=True),
}


@dataclass(frozen=True)
class Blocking:
    """Tokens and warps of a program. The work is bound by memory, and one choice serves every GPU."""

    tokens: int
    warps: int


def unit_bytes(tensor: torch.Tensor, *strides: int) -> int:
    """The largest power of two, up to 16, of which the address and these strides in elements are multiples."""
    size = tensor.element_size()
    return math.gcd(VECTOR_BYTES, tensor.data_ptr(), *(stride * size for stride in strides))


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A one-byte cache as uint8: Triton refuses float8_e4m3fn pointers on GPUs that cannot convert it."""
    return cache.view(torch.uint8) if cache.dtype in _ONE_BYTE else cache


def blocks(count: int, block: int) -> int:
    """⌈count / block⌉. ``triton.cdiv`` takes microseconds of the host's time."""
    return -(-count // block)
