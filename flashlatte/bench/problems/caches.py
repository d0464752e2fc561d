"""Tokens into caches and out of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashlatte.bench.problems.small import SMALL_BATCH, SMALL_KEYS, Scaled


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
class GatherRecords(CacheGather):
    """The same, byte for byte."""

    operation: ClassVar[str] = "gather_records"

    @property
    def name(self) -> str:
        return f"records-{self.cache_format}-{self.tokens}"


@dataclass(frozen=True)
class CacheCopy(Scaled):
    """``pages`` pages of one half of a cache to the other, both in random order; the lists are on the device."""

    pages: int
    cache_format: str = "v32"
    page_size: int = 64
    operation: ClassVar[str] = "cache_copy"
    name_pattern: ClassVar[str] = "copy-{cache_format}-pages{pages}"


@dataclass(frozen=True)
class ReshapeAndCache(Scaled):
    """bf16 keys and values of 128 elements into random slots of pages of ``dtype`` ("bf16", "e4m3" or "int8"); with a
    scale for each token and head if it is quantised.
    """

    tokens: int
    dtype: str = "bf16"
    heads: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "reshape_and_cache"
    name_pattern: ClassVar[str] = "reshape-{dtype}-t{tokens}-h{heads}"
