"""Tokens into caches and out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class CacheWrite(Problem):
    """bf16 rows into ``tokens`` random slots of a cache of twice as many."""

    cache_format: str
    tokens: int
    page_size: int = 64
    operation: ClassVar[str] = "cache_write"
    name_pattern: ClassVar[str] = "write-{cache_format}-{tokens}"


@dataclass(frozen=True)
class CacheGather(Problem):
    """``tokens`` of ``requests`` requests of equal length, out of a cache with random page order, into bf16 rows."""

    cache_format: str
    tokens: int
    requests: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "cache_gather"
    name_pattern: ClassVar[str] = "gather-{cache_format}-{tokens}"


@dataclass(frozen=True)
class GatherRecords(CacheGather):
    """The same, byte for byte."""

    operation: ClassVar[str] = "gather_records"
    name_pattern: ClassVar[str] = "records-{cache_format}-{tokens}"


@dataclass(frozen=True)
class CacheCopy(Problem):
    """``pages`` pages of one half of a cache to the other, both in random order; the lists are on the device."""

    pages: int
    cache_format: str = "v32"
    page_size: int = 64
    operation: ClassVar[str] = "cache_copy"
    name_pattern: ClassVar[str] = "copy-{cache_format}-pages{pages}"


@dataclass(frozen=True)
class ReshapeAndCache(Problem):
    """bf16 keys and values of 128 elements into random slots of pages of ``dtype`` ("bf16", "e4m3" or "int8"); with a
    scale for each token and head if it is quantised.
    """

    tokens: int
    dtype: str = "bf16"
    heads: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "reshape_and_cache"
    name_pattern: ClassVar[str] = "reshape-{dtype}-t{tokens}-h{heads}"
