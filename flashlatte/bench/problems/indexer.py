"""Index logits, the largest of them, and both in one call."""

from __future__ import annotations

from dataclasses import dataclass

from flashlatte.bench.problems.base import Problem

ROW_VALUES = ("normal", "equal", "mostly-zero", "concentrated", "sorted", "subnormal", "few-distinct")


@dataclass(frozen=True)
class IndexLogits(Problem, operation="index_logits"):
    """Index logits of e4m3 keys: the last ``rows`` queries of ``keys`` tokens, each over the keys up to its own.

    Attributes:
        ranges: a random range of keys for each query instead.
        clean: fill columns outside a query's range with -inf.
        dtype: dtype of the logits, "fp32" or "bf16".
    """

    rows: int
    keys: int
    heads: int
    head_dim: int = 128
    ranges: bool = False
    clean: bool = False
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        return "-".join([f"q{self.rows}-k{self.keys}-h{self.heads}", *_options(self, "ranges")])


@dataclass(frozen=True)
class IndexerLoss(Problem, operation="indexer_loss"):
    """The indexer's loss and its gradients: ``topk`` keys for each of ``s_q`` queries, or all keys up to its own if 0.

    Attributes:
        h_q, head_dim: heads and head dim of the attention.
        heads, index_dim: heads and head dim of the indexer.
    """

    h_q: int
    heads: int
    topk: int
    s_kv: int
    s_q: int = 4096
    head_dim: int = 576
    index_dim: int = 128
    deterministic: bool = False

    @property
    def name(self) -> str:
        keys = f"top{self.topk}" if self.topk else "causal"
        shape = f"indexer-loss-h{self.h_q}-{self.heads}-{keys}-q{self.s_q}-kv{self.s_kv}"
        return shape + ("-deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class PagedIndexLogits(Problem, operation="paged_index_logits"):
    """Index logits over a cache: ``next_n`` query tokens of each of ``batch`` requests of ``keys`` tokens.

    Attributes:
        varlen: random lengths of up to ``keys``.
        clean, dtype: as in ``IndexLogits``.
    """

    batch: int
    keys: int
    next_n: int = 1
    heads: int = 64
    page_size: int = 64
    head_dim: int = 128
    varlen: bool = False
    clean: bool = False
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        pages = [f"p{self.page_size}"] if self.page_size != 64 else []
        shape = f"b{self.batch}-n{self.next_n}-k{self.keys}-h{self.heads}"
        return "-".join([shape, *pages, *_options(self, "varlen")])


@dataclass(frozen=True)
class SparseIndexLogits(Problem, operation="sparse_index_logits"):
    """Index logits of ``blocks`` random candidate blocks of ``block_size`` keys for each of ``rows`` queries, over a
    cache of ``keys`` tokens in mxfp4.

    Attributes:
        dtype: dtype of the logits, "fp32" or "bf16".
    """

    rows: int
    keys: int
    blocks: int
    block_size: int = 8
    heads: int = 64
    page_size: int = 64
    head_dim: int = 128
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        pages = [f"p{self.page_size}"] if self.page_size != 64 else []
        head_dim = [f"d{self.head_dim}"] if self.head_dim != 128 else []
        dtype = [self.dtype] if self.dtype != "bf16" else []
        shape = f"q{self.rows}-k{self.keys}-blocks{self.blocks}x{self.block_size}-h{self.heads}"
        return "-".join([shape, *pages, *head_dim, *dtype])


@dataclass(frozen=True)
class IndexSelect(Problem, operation="index_select"):
    """The ``k`` keys with the largest of these logits, with a workspace of ``workspace_mib`` MiB for logits."""

    logits: IndexLogits
    k: int = 2048
    workspace_mib: int = 512

    @property
    def name(self) -> str:
        workspace = [f"workspace{self.workspace_mib}"] if self.workspace_mib != 512 else []
        return "-".join([f"{self.logits.name}-top{self.k}", *workspace])


@dataclass(frozen=True)
class PagedIndexSelect(Problem, operation="paged_index_select"):
    """``IndexSelect`` over a cache, with the result as slots of the cache."""

    logits: PagedIndexLogits
    k: int = 2048

    @property
    def name(self) -> str:
        return f"{self.logits.name}-top{self.k}-slots"


@dataclass(frozen=True)
class TopK(Problem, operation="topk"):
    """The ``k`` largest values of each of ``rows`` rows of ``width``.

    Attributes:
        values: the distribution of a row's values, one of ``ROW_VALUES``; all except normal values are hard cases.
    """

    rows: int
    width: int
    k: int = 2048
    values: str = "normal"

    @property
    def name(self) -> str:
        values = "" if self.values == "normal" else f"-{self.values}"
        return f"r{self.rows}-w{self.width}-top{self.k}{values}"


def _options(problem: IndexLogits | PagedIndexLogits, lengths: str) -> list[str]:
    head_dim = [f"d{problem.head_dim}"] if problem.head_dim != 128 else []
    dtype = [problem.dtype] if problem.dtype != "fp32" else []
    return [*head_dim, *(flag for flag in (lengths, "clean") if getattr(problem, flag)), *dtype]
