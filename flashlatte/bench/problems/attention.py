"""Decode and prefill, dense and over selected tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlatte import kv_cache
from flashlatte.bench.problems.base import Problem, named


@dataclass(frozen=True)
class DenseDecode(Problem, operation="dense_decode", pattern="b{batch}-sq{s_q}-h{h_q}-k{keys}"):
    """Queries of ``batch`` requests over a paged latent cache.

    Attributes:
        keys: keys of each request; their mean if ``varlen``; those of the first request if ``uneven``.
        uneven: keys of the other requests; empty: all requests have ``keys``.
        dtype: "bf16" or "fp16", dtype of q, and of the cache unless ``cache_format`` is "fp8".
        precision: as in ``dense_decode``.
    """

    batch: int
    s_q: int
    h_q: int
    keys: int
    varlen: bool = named(False, "-varlen")
    uneven: tuple[int, ...] = named((), "-uneven")
    causal: bool = named(False, "-causal")
    dtype: str = named("bf16", "-{}")
    cache_format: str | None = named(None, "-{}")
    page_size: int = named(64, "-p{}")
    head_dim: int = 576
    precision: str | None = named(None, "-precision-{}")

    def scaled_down(self) -> DenseDecode:
        smaller = super().scaled_down()
        return replace(smaller, uneven=tuple(min(keys, smaller.keys) for keys in self.uneven[: smaller.batch - 1]))


@dataclass(frozen=True)
class SparseDecode(Problem, operation="sparse_decode", pattern="{cache_format}-b{batch}-sq{s_q}-h{h_q}-top{topk}"):
    """Queries of ``batch`` requests over selected tokens of a paged cache, and of a second one.

    Attributes:
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
    extra_topk: int = named(0, "+{}")
    extra_tokens: int = 0
    extra_page_size: int = named(64, "-page{}")
    extra_varlen: bool = named(False, "-varlen")

    @property
    def head_dim(self) -> int:
        return kv_cache.get_format(self.cache_format).head_dim


@dataclass(frozen=True)
class SparsePrefill(Problem, operation="sparse_prefill"):
    """``s_q`` queries over selected tokens of one contiguous latent.

    Attributes:
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
    """Multi-head attention of ``batch`` packed sequences.

    Attributes:
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
class PagedAttention(
    Problem,
    operation="paged_attention",
    pattern="paged-b{batch}-sq{queries}-k{keys}-h{h_q}-{h_kv}-{dtype}-p{page_size}",
):
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
