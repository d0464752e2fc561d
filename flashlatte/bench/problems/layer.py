"""Operations of the layers of DeepSeek-V3 and -V4 other than attention and matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from flashlatte.bench.problems.base import Problem


@dataclass(frozen=True)
class LatentRows(Problem, operation="latent_rows", pattern="latent-rows-t{tokens}-{rank}"):
    """Latents of 512 + 64 elements and queries' latents of ``rank``, normalized, rotated, and written to a cache."""

    tokens: int
    rank: int = 1536


@dataclass(frozen=True)
class RotateHeads(Problem, operation="rotate_heads", pattern="rotate-heads-t{tokens}-h{heads}"):
    tokens: int
    heads: int = 128


@dataclass(frozen=True)
class RopeCacheWrite(Problem, operation="rope_cache_write", pattern="rope-write-{cache_format}-t{tokens}-h{heads}"):
    """Keys and queries rotated in place, the keys written into pages."""

    tokens: int
    heads: int = 128
    cache_format: str = "bf16"


@dataclass(frozen=True)
class ConcatMlaQ(Problem, operation="concat_mla_q", pattern="concat-q-t{tokens}-h{heads}"):
    """Latent parts of 512 and rotated ones of 64, heads before tokens in memory, as products leave them."""

    tokens: int
    heads: int = 128


@dataclass(frozen=True)
class MergeStates(Problem, operation="merge_states", pattern="merge-{parts}-t{tokens}-h{heads}"):
    """``parts`` results of attention over different keys, heads of dimension 128."""

    tokens: int
    parts: int = 2
    heads: int = 128


@dataclass(frozen=True)
class PackSeq(Problem, operation="pack_seq", pattern="pack-b{batch}-t{tokens}-h{heads}"):
    """``batch`` requests of up to ``tokens`` tokens, heads of dimension 576, into rows of equal length."""

    batch: int
    tokens: int
    heads: int = 16


@dataclass(frozen=True)
class UnpackSeq(PackSeq, operation="unpack_seq", pattern="unpack-b{batch}-t{tokens}-h{heads}"):
    """The inverse of ``PackSeq``."""


@dataclass(frozen=True)
class Compress(Problem, operation="compress"):
    """The compressor over a prefill of ``tokens`` tokens of one request, or over one token of each of ``requests``
    requests if there are some, with states and rows in pages.

    Attributes:
        dtype: dtype of the input, "float32" or "bfloat16".
    """

    cache_format: str
    ratio: int
    tokens: int = 0
    requests: int = 0
    dtype: str = "float32"

    @property
    def name(self) -> str:
        shape = f"b{self.requests}-decode" if self.requests else f"t{self.tokens}"
        return f"compress-{self.cache_format}-r{self.ratio}-{shape}-{self.dtype}"


@dataclass(frozen=True)
class QKVNorm(Problem, operation="q_kv_norm", pattern="qkvnorm-t{tokens}-{rank}-{head_dim}"):
    tokens: int
    rank: int = 1024
    head_dim: int = 512


@dataclass(frozen=True)
class RotateAndCache(Problem, operation="rotate_and_cache", pattern="rotate-{cache_format}-t{tokens}-h{heads}"):
    tokens: int
    heads: int = 64
    cache_format: str = "model1"


@dataclass(frozen=True)
class InverseRopeQuantize(Problem, operation="inverse_rope_quantize", pattern="inverse-rope-t{tokens}-h{heads}"):
    tokens: int
    heads: int = 64


@dataclass(frozen=True)
class IndexQuery(Problem, operation="index_query"):
    """Queries of the indexer in e4m3, or in mxfp4 if ``four_bits``."""

    tokens: int
    heads: int = 64
    four_bits: bool = False

    @property
    def name(self) -> str:
        return f"index-query{'-mxfp4' if self.four_bits else ''}-t{self.tokens}-h{self.heads}"


@dataclass(frozen=True)
class IndexWeights(Problem, operation="index_weights", pattern="index-weights-t{tokens}-{hidden}-h{heads}"):
    tokens: int
    hidden: int = 7168
    heads: int = 64


@dataclass(frozen=True)
class IndexWorkspace(Problem, operation="index_workspace", pattern="index-workspace-t{tokens}-top{topk}-w{window}"):
    """Rows of a workspace for ``topk`` groups and a window of each of ``tokens`` tokens of one request."""

    tokens: int
    topk: int = 512
    window: int = 128
    ratio: int = 4


@dataclass(frozen=True)
class MhcPre(Problem, operation="mhc_pre", pattern="mhc-pre-t{tokens}-{hidden}"):
    """Four streams of ``hidden`` elements per token."""

    tokens: int
    hidden: int = 4096


@dataclass(frozen=True)
class MhcPost(MhcPre, operation="mhc_post", pattern="mhc-post-t{tokens}-{hidden}"):
    pass
