"""Cache formats: how one token's latent and rope become bytes, and where in a page those bytes lie.

A page is a sequence of *planes*. Plane p holds ``width`` elements for each token of the page, token after
token; the planes follow each other. An interleaved format has one plane, so that a token's bytes lie together;
``model1`` has two, first the data of all tokens, then the scales of all tokens.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

ROPE_DIM = 64


@dataclass(frozen=True)
class Plane:
    """One plane of a page: ``width`` elements of ``dtype`` a token."""

    width: int
    dtype: torch.dtype


class Tiling(NamedTuple):
    """Where a token's bytes lie in a format whose e4m3 latent has a scale for each tile and whose rope is bf16.

    Kernels take it as one constant.

    Attributes:
        tile: latent values that share a scale.
        tiles: scales of a token.
        scale_places: ``tiles`` rounded up to a power of two: so many scales a token has room for.
        row_bytes: from token to token in the plane that holds latent and rope.
        rope_offset: of the rope's bytes in that row; ``row_bytes`` where a row has no rope.
        e8m0: scales are E8M0 bytes in a plane of their own behind the page's tokens; else float32 behind the latent.
    """

    tile: int
    tiles: int
    scale_places: int
    row_bytes: int
    rope_offset: int
    e8m0: bool


class BlockScaling(NamedTuple):
    """Where a token's bytes lie in a format that keeps them together: numbers in blocks that share a one-byte scale.

    The numbers of a row that have scales, ``block`` · ``blocks`` of them, stand first; what a row has beyond them is
    e4m3 without a scale. Kernels take it as one constant.

    Attributes:
        fp4: numbers are e2m1, two a byte with the even one in the low half, and scales e4m3; else e4m3 and E8M0.
        block: numbers that share a scale.
        blocks: scales of a token.
        scale_offset: of the scales' bytes in a token.
        token_bytes: from token to token.
        scale_lanes: the scale of block s is byte blocks / scale_lanes · (s % scale_lanes) + s // scale_lanes.
        rounds_up: an e4m3 scale is no less than amax / 6, where there is one; else the nearest.
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

    A new format is a subclass with ``planes``, ``encode`` and ``decode``, and its place in ``registry``: allocation
    and the reference operations then serve it. Kernels look at ``plain``, ``tiling`` and ``block_scaling``, and refuse
    a format that none of them describes.

    Attributes:
        name: the format's public name.
        record_dtype: of a cache tensor's elements.
        accepted_dtypes: dtypes of cache tensors that are taken for this format.
        page_alignment: bytes of which the distance from page to page is a multiple, in a cache that is allocated.
        row_alignment: bytes of which every token's address is a multiple, for kernels that copy many bytes at a time.
        takes_scale: one float32 scale, given beside the cache, holds for all of it.
        plain: a row is ``head_dim`` numbers of ``record_dtype``, as many as one likes.
        tiling: where kernels find the parts of a token with a scale a tile; None for other formats.
        block_scaling: where kernels find the parts of a token with a scale byte a block; None for other formats.
        inferred_dtypes: of cache tensors whose width alone tells this format; None: all ``accepted_dtypes``.
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
    def is_quantised(self) -> bool:
        """Whether a row holds less than the 16- or 32-bit numbers that were written."""
        return self.takes_scale or not self.plain

    @property
    def latent_dim(self) -> int:
        """Values before the rope part."""
        return self.head_dim - self.rope_dim

    @property
    def value_dim(self) -> int:
        """Leading values of the key row that are its value row."""
        return self.latent_dim

    @property
    def rope_dim(self) -> int:
        return ROPE_DIM

    @property
    @abc.abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a page, in the order in which they lie."""

    @property
    def record_width(self) -> int:
        """Last dimension of a cache tensor, in elements of ``record_dtype``."""
        return sum(plane.width for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        return self.record_width * self.record_dtype.itemsize

    def beside(self, width: int) -> CacheFormat:
        """The format of a second cache, ``width`` wide, that joins one of this format: this one, but for ``v41``."""
        return self

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one page to the next in a cache that ``allocate`` made."""
        used = self.bytes_per_token * page_size
        return -(-used // self.page_alignment) * self.page_alignment

    @abc.abstractmethod
    def encode(
        self, latent: torch.Tensor, rope: torch.Tensor, scale: float | torch.Tensor, scale_rounding: str
    ) -> tuple[torch.Tensor, ...]:
        """Quantise [..., latent_dim] and [..., rope_dim] to one tensor [..., width] for each plane."""

    @abc.abstractmethod
    def decode(self, planes: tuple[torch.Tensor, ...], scale: float | torch.Tensor) -> torch.Tensor:
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
