"""Writes and reads of the indexer's key cache, and slots of the selected keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class IndexQuantize(Problem):
    """bf16 keys of 128 elements into random slots of a cache with twice as many."""

    tokens: int
    cache_format: str = "index_fp8"
    page_size: int = 64
    operation: ClassVar[str] = "index_quantize"
    name_pattern: ClassVar[str] = "index-quantize-{cache_format}-t{tokens}"


@dataclass(frozen=True)
class IndexGather(Problem):
    """Keys of ``requests`` requests of ``tokens`` tokens each, out of pages in random order."""

    requests: int
    tokens: int
    cache_format: str = "index_fp8"
    page_size: int = 64
    operation: ClassVar[str] = "index_gather"
    name_pattern: ClassVar[str] = "index-gather-{cache_format}-b{requests}-t{tokens}"


@dataclass(frozen=True)
class IndexConvert(Problem):
    """``topk`` random positions of ``keys`` keys of each of ``batch`` requests to slots, with their counts."""

    batch: int
    keys: int
    topk: int = 2048
    page_size: int = 64
    compact: bool = False
    operation: ClassVar[str] = "index_convert"

    @property
    def name(self) -> str:
        compact = "-compact" if self.compact else ""
        return f"index-convert-b{self.batch}-k{self.keys}-top{self.topk}{compact}"
