"""Writes to and reads from caches, including index keys and TurboQuant records; and decode over TurboQuant caches."""

from __future__ import annotations

from dataclasses import dataclass

from flashlatte.bench.problems.base import Problem, named


@dataclass(frozen=True)
class CacheWrite(Problem, operation="cache_write", pattern="write-{cache_format}-{tokens}"):
    """bf16 rows into ``tokens`` random slots of a cache of twice as many."""

    cache_format: str
    tokens: int
    page_size: int = 64


@dataclass(frozen=True)
class CacheGather(Problem, operation="cache_gather", pattern="gather-{cache_format}-{tokens}"):
    """``tokens`` of ``requests`` requests of equal length, out of a cache with random page order, into bf16 rows."""

    cache_format: str
    tokens: int
    requests: int = 8
    page_size: int = 64


@dataclass(frozen=True)
class GatherRecords(CacheGather, operation="gather_records", pattern="records-{cache_format}-{tokens}"):
    """``CacheGather`` without conversion."""


@dataclass(frozen=True)
class CacheCopy(Problem, operation="cache_copy", pattern="copy-{cache_format}-pages{pages}"):
    """``pages`` pages of one half of a cache to the other, both in random order; the lists are on the device."""

    pages: int
    cache_format: str = "v32"
    page_size: int = 64


@dataclass(frozen=True)
class ReshapeAndCache(Problem, operation="reshape_and_cache", pattern="reshape-{dtype}-t{tokens}-h{heads}"):
    """bf16 keys and values of 128 elements into random slots of pages of ``dtype`` ("bf16", "e4m3" or "int8"); with a
    scale for each token and head if it is quantized.
    """

    tokens: int
    dtype: str = "bf16"
    heads: int = 8
    page_size: int = 64


@dataclass(frozen=True)
class IndexQuantize(Problem, operation="index_quantize", pattern="index-quantize-{cache_format}-t{tokens}"):
    """bf16 keys of 128 elements into random slots of a cache with twice as many."""

    tokens: int
    cache_format: str = "index_fp8"
    page_size: int = 64


@dataclass(frozen=True)
class IndexGather(Problem, operation="index_gather", pattern="index-gather-{cache_format}-b{requests}-t{tokens}"):
    """Keys of ``requests`` requests of ``tokens`` tokens each, out of pages in random order."""

    requests: int
    tokens: int
    cache_format: str = "index_fp8"
    page_size: int = 64


@dataclass(frozen=True)
class IndexConvert(Problem, operation="index_convert", pattern="index-convert-b{batch}-k{keys}-top{topk}"):
    """``topk`` random positions of ``keys`` keys of each of ``batch`` requests to slots, with their counts."""

    batch: int
    keys: int
    topk: int = 2048
    page_size: int = 64
    compact: bool = named(False, "-compact")


@dataclass(frozen=True)
class TurboQuantDecode(Problem, operation="turboquant_decode"):
    """One query token of each of ``batch`` requests of ``keys`` tokens, heads of dimension 128."""

    cache_format: str
    batch: int
    keys: int
    h_q: int = 32
    h_kv: int = 8
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.cache_format.removeprefix('turboquant_')}-b{self.batch}-h{self.h_q}-{self.h_kv}-k{self.keys}"


@dataclass(frozen=True)
class TurboQuantStore(Problem, operation="turboquant_store"):
    """Keys and values of ``tokens`` tokens, heads of dimension 128, into pages."""

    cache_format: str
    tokens: int
    h_kv: int = 8
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.cache_format.removeprefix('turboquant_')}-t{self.tokens}-h{self.h_kv}"


@dataclass(frozen=True)
class TurboQuantGather(TurboQuantStore, operation="turboquant_gather"):
    """``tokens`` tokens of one request out of pages in random order, to bf16."""

    @property
    def name(self) -> str:
        return f"gather-{super().name}"
