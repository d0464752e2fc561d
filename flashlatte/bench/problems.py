"""What a benchmark case computes: the shapes, as values that compare and print."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

# A machine without a GPU runs the same code on these sizes at most.
SMALL_BATCH, SMALL_HEADS, SMALL_KEYS, SMALL_TOPK, SMALL_QUERIES = 2, 16, 256, 64, 16


@dataclass(frozen=True)
class DenseDecode:
    """Attributes: ``keys`` of every request, or their mean if ``varlen``, or of the longest if ``uneven`` names what
    the others have; ``dtype`` "bf16" or "fp16", also of the cache unless ``cache_format`` is "fp8".
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
    operation: ClassVar[str] = "dense_decode"

    @property
    def name(self) -> str:
        flags = [flag for flag in ("varlen", "uneven", "causal") if getattr(self, flag)]
        dtype = [self.dtype] if self.dtype != "bf16" else []
        cache = [self.cache_format] if self.cache_format else []
        pages = [f"p{self.page_size}"] if self.page_size != 64 else []
        return "-".join([f"b{self.batch}-sq{self.s_q}-h{self.h_q}-k{self.keys}", *flags, *dtype, *cache, *pages])

    def scaled_down(self) -> DenseDecode:
        return replace(
            self,
            batch=min(self.batch, SMALL_BATCH),
            h_q=min(self.h_q, SMALL_HEADS),
            keys=min(self.keys, SMALL_KEYS),
            uneven=tuple(min(keys, SMALL_KEYS) for keys in self.uneven[: SMALL_BATCH - 1]),
        )


@dataclass(frozen=True)
class SparseDecode:
    """Attributes: ``tokens`` of every request in the cache, of which each query selects ``topk``; ``extra_*`` the
    same for the second cache (none if ``extra_topk`` is 0), of whose selection only some counts if ``extra_varlen``.
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
    operation: ClassVar[str] = "sparse_decode"

    @property
    def name(self) -> str:
        extra = f"+{self.extra_topk}" if self.extra_topk else ""
        page = [f"page{self.extra_page_size}"] if self.extra_topk and self.extra_page_size != 64 else []
        varlen = ["varlen"] if self.extra_varlen else []
        shape = f"{self.cache_format}-b{self.batch}-sq{self.s_q}-h{self.h_q}-top{self.topk}{extra}"
        return "-".join([shape, *page, *varlen])

    @property
    def head_dim(self) -> int:
        return 512 if self.cache_format == "model1" else 576

    def scaled_down(self) -> SparseDecode:
        return replace(
            self,
            batch=min(self.batch, SMALL_BATCH),
            h_q=min(self.h_q, SMALL_HEADS),
            topk=min(self.topk, SMALL_TOPK),
            tokens=min(self.tokens, SMALL_KEYS),
            extra_topk=min(self.extra_topk, SMALL_TOPK),
            extra_tokens=min(self.extra_tokens, SMALL_KEYS),
        )


@dataclass(frozen=True)
class SparsePrefill:
    """Attributes: ``overlap``, the share of a query's tokens that the one before it has too, if above 0."""

    head_dim: int
    h_q: int
    topk: int
    s_kv: int
    s_q: int = 4096
    overlap: float = 0.0
    operation: ClassVar[str] = "sparse_prefill"

    @property
    def name(self) -> str:
        overlap = f"-overlap{100 * self.overlap:.0f}" if self.overlap else ""
        return f"d{self.head_dim}-h{self.h_q}-top{self.topk}-kv{self.s_kv}{overlap}"

    def scaled_down(self) -> SparsePrefill:
        return replace(
            self,
            h_q=min(self.h_q, SMALL_HEADS),
            topk=min(self.topk, SMALL_TOPK),
            s_kv=min(self.s_kv, SMALL_KEYS),
            s_q=min(self.s_q, SMALL_QUERIES),
        )


@dataclass(frozen=True)
class DensePrefill:
    """Attributes: ``head_dim`` of q and k; ``tokens`` (queries and keys) a request, or their mean if ``varlen``."""

    head_dim: int
    batch: int
    h_q: int
    tokens: int
    causal: bool = False
    varlen: bool = False
    operation: ClassVar[str] = "dense_prefill"

    @property
    def name(self) -> str:
        flags = [flag for flag in ("varlen", "causal") if getattr(self, flag)]
        return "-".join([f"mha{self.head_dim}-b{self.batch}-h{self.h_q}-s{self.tokens}", *flags])

    def scaled_down(self) -> DensePrefill:
        return replace(
            self,
            batch=min(self.batch, SMALL_BATCH),
            h_q=min(self.h_q, SMALL_HEADS),
            tokens=min(self.tokens, SMALL_KEYS),
        )


@dataclass(frozen=True)
class DensePrefillBackward(DensePrefill):
    deterministic: bool = False
    operation: ClassVar[str] = "dense_prefill_backward"

    @property
    def name(self) -> str:
        return f"{super().name}-backward" + ("-deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class CacheWrite:
    """bf16 rows into ``tokens`` random slots of a cache of twice as many."""

    cache_format: str
    tokens: int
    page_size: int = 64
    operation: ClassVar[str] = "cache_write"

    @property
    def name(self) -> str:
        return f"write-{self.cache_format}-{self.tokens}"

    def scaled_down(self) -> CacheWrite:
        return replace(self, tokens=min(self.tokens, SMALL_KEYS))


@dataclass(frozen=True)
class CacheGather:
    """``tokens`` of ``requests`` requests of equal length, out of a cache with random page order, into bf16 rows."""

    cache_format: str
    tokens: int
    requests: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "cache_gather"

    @property
    def name(self) -> str:
        return f"gather-{self.cache_format}-{self.tokens}"

    def scaled_down(self) -> CacheGather:
        return replace(self, tokens=min(self.tokens, SMALL_KEYS), requests=min(self.requests, SMALL_BATCH))


@dataclass(frozen=True)
class IndexLogits:
    """Index logits of e4m3 keys of 128 values: the last ``rows`` queries of ``keys`` tokens, each over the keys up to
    its own.
    """

    rows: int
    keys: int
    heads: int
    operation: ClassVar[str] = "index_logits"

    @property
    def name(self) -> str:
        return f"q{self.rows}-k{self.keys}-h{self.heads}"

    def scaled_down(self) -> IndexLogits:
        return IndexLogits(min(self.rows, SMALL_QUERIES), min(self.keys, SMALL_KEYS), min(self.heads, SMALL_HEADS))


@dataclass(frozen=True)
class PagedIndexLogits:
    """The same over a cache: ``next_n`` query tokens of each of ``batch`` requests of ``keys`` tokens."""

    batch: int
    keys: int
    next_n: int = 1
    heads: int = 64
    page_size: int = 64
    operation: ClassVar[str] = "paged_index_logits"

    @property
    def name(self) -> str:
        return f"b{self.batch}-n{self.next_n}-k{self.keys}-h{self.heads}"

    def scaled_down(self) -> PagedIndexLogits:
        return replace(
            self,
            batch=min(self.batch, SMALL_BATCH),
            keys=min(self.keys, SMALL_KEYS),
            heads=min(self.heads, SMALL_HEADS),
        )


@dataclass(frozen=True)
class TopK:
    """The ``k`` largest of normal random numbers, for ``rows`` rows of ``width``."""

    rows: int
    width: int
    k: int = 2048
    operation: ClassVar[str] = "topk"

    @property
    def name(self) -> str:
        return f"r{self.rows}-w{self.width}-top{self.k}"

    def scaled_down(self) -> TopK:
        return TopK(min(self.rows, SMALL_BATCH), min(self.width, SMALL_KEYS), min(self.k, SMALL_TOPK))


@dataclass(frozen=True)
class TurboQuantDecode:
    """One query token of each of ``batch`` requests of ``keys`` tokens, heads of 128 numbers."""

    cache_format: str
    batch: int
    keys: int
    h_q: int = 32
    h_kv: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "turboquant_decode"

    @property
    def name(self) -> str:
        return f"{self.cache_format.removeprefix('turboquant_')}-b{self.batch}-h{self.h_q}-{self.h_kv}-k{self.keys}"

    def scaled_down(self) -> TurboQuantDecode:
        return replace(self, batch=min(self.batch, SMALL_BATCH), keys=min(self.keys, SMALL_KEYS))


@dataclass(frozen=True)
class TurboQuantStore:
    """Keys and values of ``tokens`` tokens, heads of 128 numbers, into pages."""

    cache_format: str
    tokens: int
    h_kv: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "turboquant_store"

    @property
    def name(self) -> str:
        return f"{self.cache_format.removeprefix('turboquant_')}-t{self.tokens}-h{self.h_kv}"

    def scaled_down(self) -> TurboQuantStore:
        return replace(self, tokens=min(self.tokens, SMALL_KEYS))


Problem = (
    DenseDecode
    | SparseDecode
    | SparsePrefill
    | DensePrefill
    | CacheWrite
    | CacheGather
    | IndexLogits
    | PagedIndexLogits
    | TopK
    | TurboQuantDecode
    | TurboQuantStore
)
