"""Cache formats: how one token's latent and rope become bytes, and where in a page those bytes lie.

A page is a sequence of *planes*. Plane p holds ``width`` elements for each token of the page, token after
token; the planes follow each other. An interleaved format has one plane, so that a token's bytes lie together;
``model1`` has two, first the data of all tokens, then the scales of all tokens.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch

ROPE_DIM = 64


@dataclass(frozen=True)
class Plane:
    """One plane of a page: ``width`` elements of ``dtype`` a token."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheFormat(abc.ABC):
    """A cache format. Rows have ``head_dim`` = ``latent_dim`` + ``rope_dim`` values.

    Attributes:
        name: the format's public name.
        head_dim: values in a token's key row (576 = 512 latent + 64 rope; 512 = 448 + 64 for ``model1``).
        latent_dim: values before the rope part.
        value_dim: leading values of the key row that are its value row (512).
    """

    name: ClassVar[str]
    record_dtype: ClassVar[torch.dtype]
    accepted_dtypes: ClassVar[tuple[torch.dtype, ...]]
    page_alignment: ClassVar[int] = 1
    takes_scale: ClassVar[bool] = False
    fixed_split: ClassVar[bool] = True  # latent and rope are stored apart, so their widths are given

    head_dim: int = 576

    @property
    def latent_dim(self) -> int:
        return self.head_dim - self.rope_dim

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
