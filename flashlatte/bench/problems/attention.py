"""Decode and prefill, dense and over selected tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlatte import kv_cache
from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class DenseDecode(Problem, operation="dense_decode"):
    """Attributes:
    keys: keys of each request; their mean if ``varlen``; those of the first request if ``uneven``.
    uneven: keys of the other requests; empty: all requests have ``keys``.
    dtype: "bf16" or "fp16", dtype of q, and of the cache unless ``cache_format`` is "fp8".
    precision: as in ``dense_decode``.
    """

    batch: int
    s_q: int
    h_q: int
    keys: int
    varlen: bool = False
    causal: bool = False
    dtype: str = "bf16"
    page_size: int = 64
    head_dim: int = 576
    cache_format: str | None = None
    uneven: tuple[int, ...] = ()
    precision: str | None = None

    @property
    def name(self) -> str:
        flags = [flag for flag in ("varlen", "uneven", "causal") if getattr(self, flag)]
        dtype = [self.dtype] if self.dtype != "bf16" else []
        cache = [self.cache_format] if self.cache_format else []
        pages = [f"p{self.page_size}"] if self.page_size != 64 else []
        precision = [f"precision-{self.precision}"] if self.precision else []
        shape = f"b{self.batch}-sq{self.s_q}-h{self.h_q}-k{self.keys}"
        return "-".join([shape, *flags, *dtype, *cache, *pages, *precision])

    def scaled_down(self) -> DenseDecode:
        smaller = super().scaled_down()
        return replace(smaller, uneven=tuple(min(keys, smaller.keys) for keys in self.uneven[: smaller.batch - 1]))


@dataclass(frozen=True)
class SparseDecode(Problem, operation="sparse_decode"):
    """Attributes:
    tokens: tokens of each request in the cache.
    topk: number of these tokens that each query selects.
    extra_tokens, extra_topk: the same for the second cache; none if ``extra_topk`` is 0.
    extra_varlen: pass a length for each selection of the second cache.
    """

    cache_format: str
    batch: int
    s_q: int
    h_q: int
    topk: int
    tokens: int
    page_size: int
    extra_topk: int = 0
    extra_tokens: int = 0
    extra_page_size: int = 64
    extra_varlen: bool = False

    @property
    def name(self) -> str:
        extra = f"+{self.extra_topk}" if self.extra_topk else ""
        page = [f"page{self.extra_page_size}"] if self.extra_topk and self.extra_page_size != 64 else []
        varlen = ["varlen"] if self.extra_varlen else []
        shape = f"{self.cache_format}-b{self.batch}-sq{self.s_q}-h{self.h_q}-top{self.topk}{extra}"
        return "-".join([shape, *page, *varlen])

    @property
    def head_dim(self) -> int:
        return kv_cache.get_format(self.cache_format).head_dim


@dataclass(frozen=True)
class SparsePrefill(Problem, operation="sparse_prefill"):
    """Attributes:
    overlap: fraction of a query's tokens that the previous query selects too, if above 0.
    precision: as in ``sparse_prefill``.
    """

    head_dim: int
    h_q: int
    topk: int
    s_kv: int
    s_q: int = 4096
    overlap: float = 0.0
    precision: str | None = None

    @property
    def name(self) -> str:
        overlap = f"-overlap{100 * self.overlap:.0f}" if self.overlap else ""
        precision = f"-precision-{self.precision}" if self.precision else ""
        return f"d{self.head_dim}-h{self.h_q}-top{self.topk}-kv{self.s_kv}{overlap}{precision}"


@dataclass(frozen=True)
class SparseAttentionBackward(SparsePrefill, operation="sparse_attention_backward"):
    deterministic: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}-backward" + ("-deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class DensePrefill(Problem, operation="dense_prefill"):
    """Attributes:
    head_dim: head dim of q and k.
    tokens: queries, and keys, of each request; their mean if ``varlen``.
    """

    head_dim: int
    batch: int
    h_q: int
    tokens: int
    causal: bool = False
    varlen: bool = False

    @property
    def name(self) -> str:
        flags = [flag for flag in ("varlen", "causal") if getattr(self, flag)]
        return "-".join([f"mha{self.head_dim}-b{self.batch}-h{self.h_q}-s{self.tokens}", *flags])


@dataclass(frozen=True)
class DensePrefillBackward(DensePrefill, operation="dense_prefill_backward"):
    deterministic: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}-backward" + ("-deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class PagedAttention(Problem, operation="paged_attention"):
    """Grouped queries, causal, heads of dimension 128: ``batch`` requests of one query and one of ``queries`` queries
    (none if 0), all of ``keys`` keys.

    Attributes: ``dtype`` of the cache: "bf16", "e4m3", "e5m2" or "int8".
    """

    batch: int
    queries: int
    keys: int
    dtype: str = "bf16"
    page_size: int = 64
    h_q: int = 32
    h_kv: int = 8

    @property
    def name(self) -> str:
        shape = f"paged-b{self.batch}-sq{self.queries}-k{self.keys}-h{self.h_q}-{self.h_kv}"
        return f"{shape}-{self.dtype}-p{self.page_size}"
