"""TurboQuant caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class TurboQuantDecode(Problem):
    """One query token of each of ``batch`` requests of ``keys`` tokens, heads of dimension 128."""

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


@dataclass(frozen=True)
class TurboQuantStore(Problem):
    """Keys and values of ``tokens`` tokens, heads of dimension 128, into pages."""

    cache_format: str
    tokens: int
    h_kv: int = 8
    page_size: int = 64
    operation: ClassVar[str] = "turboquant_store"

    @property
    def name(self) -> str:
        return f"{self.cache_format.removeprefix('turboquant_')}-t{self.tokens}-h{self.h_kv}"


@dataclass(frozen=True)
class TurboQuantGather(TurboQuantStore):
    """``tokens`` tokens of one request out of pages in random order, to bf16."""

    operation: ClassVar[str] = "turboquant_gather"

    @property
    def name(self) -> str:
        return f"gather-{super().name}"
