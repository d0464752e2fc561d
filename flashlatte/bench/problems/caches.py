"""Tokens into caches and out of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashlatte.bench.problems.small import SMALL_BATCH, SMALL_KEYS


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
