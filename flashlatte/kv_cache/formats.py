"""Cache formats: the encoding of a token's latent and rope, and the layout of a page.

A page is a sequence of *planes*. Plane p holds ``width`` elements for each token of the page, in token order. An
interleaved format has one plane, so a token's bytes are contiguous. ``model1`` has two: the data of all tokens, then
the scales of all tokens.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

ROPE_DIM = 64
# The scale of a whole cache, and tensors [..., width], one for each plane.
Scale = float | torch.Tensor
PlaneRows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Plane:
    """One plane of a page: ``width`` elements of ``dtype`` per token."""

    width: int
    dtype: torch.dtype


class Tiling(NamedTuple):
    """The layout of a token in a format with an e4m3 latent, a scale per tile, and a bf16 rope.

    Kernels take it as a constant.

    Attributes:
        tile: latent values that share a scale.
        tiles: scales per token.
        padded_tiles: scales that a token has room for: ``tiles`` rounded up to a power of two.
        row_bytes: token stride, in bytes, of the plane that holds latent and rope.
        rope_offset: byte offset of the rope in that row; ``row_bytes`` if a row has no rope.
        e8m0: scales are E8M0 bytes in a separate plane after the tokens of a page; else float32 after the latent.
    """

    tile: int
    tiles: int
    padded_tiles: int
    row_bytes: int
    rope_offset: int
    e8m0: bool


class BlockScaling(NamedTuple):
    """The layout of a token in a format with contiguous tokens and a one-byte scale per block of values.

    The first ``block`` · ``blocks`` values of a row have scales; the values after them are e4m3 without a scale.
    Kernels take it as a constant.

    Attributes:
        fp4: values are e2m1, two per byte with the even one in the low half, and scales e4m3; else e4m3 and E8M0.
        block: values that share a scale.
        blocks: scales per token.
        scale_offset: byte offset of the scales in a token.
        token_bytes: token stride in bytes.
        scale_lanes: the scale of block s is byte blocks / scale_lanes · (s % scale_lanes) + s // scale_lanes.
        rounds_up: an e4m3 scale is amax / 6 rounded up; else rounded to nearest.
    """

    fp4: bool
    block: int
    blocks: int
    scale_offset: int
    token_bytes: int
    scale_lanes: int = 1
    rounds_up: bool = False


@dataclass(frozen=True)
class CacheFormat(abc.ABC):
    """A cache format. Rows have ``head_dim`` = ``latent_dim`` + ``rope_dim`` values.

    A new format is a subclass that implements ``planes``, ``encode`` and ``decode``, with an entry in ``registry``.
    That suffices for allocation and the reference operations. Kernels read ``plain``, ``tiling`` and ``block_scaling``,
    and do not accept a format that has none of these.

    Attributes:
        name: the format's public name.
        record_dtype: element dtype of a cache tensor.
        accepted_dtypes: dtypes of cache tensors that are accepted for this format.
        page_alignment: alignment, in bytes, of the page stride of an allocated cache.
        row_alignment: alignment, in bytes, of every token's address, for kernels that copy many bytes at a time.
        takes_scale: a cache has one float32 scale, which is passed as an argument.
        plain: a row is ``head_dim`` elements of ``record_dtype``, for any head_dim.
        tiling: layout of a token with a scale per tile; None for other formats.
        block_scaling: layout of a token with a scale byte per block; None for other formats.
        inferred_dtypes: dtypes of cache tensors whose width alone identifies this format; None: ``accepted_dtypes``.
        has_exact_scales: scales need not be powers of two.
        head_dim: values in a token's key row (576 = 512 latent + 64 rope; 512 = 448 + 64 for ``model1``).
    """

    name: ClassVar[str]
    record_dtype: ClassVar[torch.dtype]
    accepted_dtypes: ClassVar[tuple[torch.dtype, ...]]
    page_alignment: ClassVar[int] = 1
    row_alignment: ClassVar[int] = 16
    takes_scale: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    tiling: ClassVar[Tiling | None] = None
    block_scaling: ClassVar[BlockScaling | None] = None
    inferred_dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    has_exact_scales: ClassVar[bool] = True

    head_dim: int = 576

    @property
    def is_quantized(self) -> bool:
        """Whether rows are stored with less precision than 16 bits."""
        return self.takes_scale or not self.plain

    @property
    def latent_dim(self) -> int:
        """Values before the rope part."""
        return self.head_dim - self.rope_dim

    @property
    def value_dim(self) -> int:
        """The number of leading values of a key row that form the value row."""
        return self.latent_dim

    @property
    def rope_dim(self) -> int:
        return ROPE_DIM

    @property
    @abc.abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a page, in memory order."""

    @property
    def record_width(self) -> int:
        """Last dimension of a cache tensor, in elements of ``record_dtype``."""
        return sum(plane.width for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        return self.record_width * self.record_dtype.itemsize

    def second_format(self, width: int) -> CacheFormat:
        """The format of a second cache, ``width`` wide, next to one of this format: the same, except for ``v41``."""
        return self

    def page_bytes(self, page_size: int) -> int:
        """Page stride, in bytes, of a cache from ``allocate``."""
        used = self.bytes_per_token * page_size
        return -(-used // self.page_alignment) * self.page_alignment

    @abc.abstractmethod
    def encode(self, latent: torch.Tensor, rope: torch.Tensor, scale: Scale, scale_rounding: str) -> PlaneRows:
        """Quantize [..., latent_dim] and [..., rope_dim] to one tensor [..., width] for each plane."""

    @abc.abstractmethod
    def decode(self, planes: PlaneRows, scale: Scale) -> torch.Tensor:
        """Inverse of ``encode``: float32 rows [..., head_dim]."""

    def page_views(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The planes of a cache [pages, page_size, 1, record_width] as strided views [pages, page_size, width]."""
        cache = cache.view(self.record_dtype)
        if len(self.planes) == 1:
            return (cache.squeeze(2),)
        num_pages, page_size = cache.shape[:2]
        pages = cache.view(num_pages, page_size * self.record_width)
        parts = pages.split([page_size * plane.width for plane in self.planes], dim=1)
        return tuple(
            part.unflatten(1, (page_size, plane.width)) for part, plane in zip(parts, self.planes, strict=True)
        )


@dataclass(frozen=True)
class ByteFormat(CacheFormat):
    """Base of the quantized formats: a token is bytes, and rows have the class's ``head_dim``."""

    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn)

    def __post_init__(self) -> None:
        width = type(self).head_dim
        if self.head_dim != width:
            raise ValueError(f"head_dim of format {self.name} is {width}, got {self.head_dim}")
