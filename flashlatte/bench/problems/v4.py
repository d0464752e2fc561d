"""Operations of a DeepSeek-V4 layer other than attention and matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class Compress(Problem):
    """The compressor over a prefill of ``tokens`` tokens of one request, or over one token of each of ``requests``
    requests if there are some, with states and rows in pages.

    Attributes: ``dtype``, "float32" or "bfloat16", of the input.
    """

    cache_format: str
    ratio: int
    tokens: int = 0
    requests: int = 0
    dtype: str = "float32"
    operation: ClassVar[str] = "compress"

    @property
    def name(self) -> str:
        shape = f"b{self.requests}-decode" if self.requests else f"t{self.tokens}"
        return f"compress-{self.cache_format}-r{self.ratio}-{shape}-{self.dtype}"


@dataclass(frozen=True)
class QKVNorm(Problem):
    tokens: int
    rank: int = 1024
    head_dim: int = 512
    operation: ClassVar[str] = "q_kv_norm"
    name_pattern: ClassVar[str] = "qkvnorm-t{tokens}-{rank}-{head_dim}"


@dataclass(frozen=True)
class RotateAndCache(Problem):
    tokens: int
    heads: int = 64
    cache_format: str = "model1"
    operation: ClassVar[str] = "rotate_and_cache"
    name_pattern: ClassVar[str] = "rotate-{cache_format}-t{tokens}-h{heads}"


@dataclass(frozen=True)
class InverseRopeQuantize(Problem):
    tokens: int
    heads: int = 64
    operation: ClassVar[str] = "inverse_rope_quantize"
    name_pattern: ClassVar[str] = "inverse-rope-t{tokens}-h{heads}"


@dataclass(frozen=True)
class IndexQuery(Problem):
    """Queries of the indexer in e4m3, or in mxfp4 if ``four_bits``."""

    tokens: int
    heads: int = 64
    four_bits: bool = False
    operation: ClassVar[str] = "index_query"

    @property
    def name(self) -> str:
        return f"index-query{'-mxfp4' if self.four_bits else ''}-t{self.tokens}-h{self.heads}"


@dataclass(frozen=True)
class IndexWeights(Problem):
    tokens: int
    hidden: int = 7168
    heads: int = 64
    operation: ClassVar[str] = "index_weights"
    name_pattern: ClassVar[str] = "index-weights-t{tokens}-{hidden}-h{heads}"


@dataclass(frozen=True)
class IndexWorkspace(Problem):
    """Rows of a workspace for ``topk`` groups and a window of each of ``tokens`` tokens of one request."""

    tokens: int
    topk: int = 512
    window: int = 128
    ratio: int = 4
    operation: ClassVar[str] = "index_workspace"
    name_pattern: ClassVar[str] = "index-workspace-t{tokens}-top{topk}-w{window}"


@dataclass(frozen=True)
class MhcPre(Problem):
    """Four streams of ``hidden`` elements per token."""

    tokens: int
    hidden: int = 4096
    operation: ClassVar[str] = "mhc_pre"
    name_pattern: ClassVar[str] = "mhc-pre-t{tokens}-{hidden}"


@dataclass(frozen=True)
class MhcPost(MhcPre):
    operation: ClassVar[str] = "mhc_post"
    name_pattern: ClassVar[str] = "mhc-post-t{tokens}-{hidden}"
