"""Cache formats: how one token's latent and rope become bytes, and where in a page those bytes lie.

A page is a sequence of *planes*. Plane p holds ``width`` elements for each token of the page, token after
token; the planes follow each other. An interleaved format has one plane, so that a token's bytes lie together;
``model1`` has two, first the data of all tokens, then the scales of all tokens.
"""

from __future__ import annotations

import abc
import functools
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
        views, offset = [], cache.storage_offset()
        for plane in self.planes:
            views.append(
                cache.as_strided((num_pages, page_size, plane.width), (cache.stride(0), plane.width, 1), offset)
            )
            offset += page_size * plane.width
        return tuple(views)


def as_format(cache_format: str | CacheFormat, head_dim: int | None = None) -> CacheFormat:
    """The format of this name. ``head_dim`` is free for bf16, fp16, fp32 and fp8, and fixed for the others."""
    if isinstance(cache_format, CacheFormat):
        if head_dim is not None and head_dim != cache_format.head_dim:
            raise ValueError(
                f"head_dim must be {cache_format.head_dim} as in the given {cache_format.name} format, got {head_dim}"
            )
        return cache_format
    return _format_by_name(cache_format, head_dim)


@functools.lru_cache(maxsize=256)
def _format_by_name(name: str, head_dim: int | None) -> CacheFormat:
    formats = _known_formats()
    if name not in formats:
        raise ValueError(f"cache_format must be one of {', '.join(formats)}, got {name!r}")
    cls = formats[name]
    if head_dim is None:
        return cls()
    return cls(head_dim=head_dim)


@functools.lru_cache(maxsize=1)
def _known_formats() -> dict[str, type[CacheFormat]]:
    from flashlatte.kv_cache.model1 import Model1Format
    from flashlatte.kv_cache.plain import Bf16Format, Fp8Format, Fp16Format, Fp32Format
    from flashlatte.kv_cache.v32 import V32Format

    classes = (Bf16Format, Fp16Format, Fp32Format, Fp8Format, V32Format, Model1Format)
    return {cls.name: cls for cls in classes}


def format_names() -> tuple[str, ...]:
    return tuple(_known_formats())


def infer_format(cache: torch.Tensor, name: str = "cache") -> CacheFormat:
    """The format that a cache tensor's dtype and last dimension tell.

    16- and 32-bit floats are the plain formats with that row width; one-byte caches are ``v32`` (656 wide),
    ``model1`` (584) or, as float8_e4m3fn of any other width, ``fp8``.
    """
    return _infer(cache.dtype, cache.shape[-1], name)


@functools.lru_cache(maxsize=256)
def _infer(dtype: torch.dtype, width: int, name: str) -> CacheFormat:
    by_dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if dtype in by_dtype:
        return _format_by_name(by_dtype[dtype], width)
    if dtype.itemsize == 1:
        for format_name in ("v32", "model1"):
            candidate = _format_by_name(format_name, None)
            if width == candidate.record_width and dtype in candidate.accepted_dtypes:
                return candidate
        if dtype == torch.float8_e4m3fn:
            return _format_by_name("fp8", width)
    raise ValueError(
        f"{name} must be a bfloat16, float16 or float32 cache, a float8_e4m3fn cache (fp8), or a one-byte cache "
        f"656 (v32) or 584 (model1) wide; got {str(dtype).removeprefix('torch.')} {width} wide"
    )
