"""Index logits, the largest of them, and both in one call."""

from __future__ import annotations

from dataclasses import dataclass

from flashlatte.bench.problems.base import Problem, named

ROW_VALUES = ("normal", "equal", "mostly-zero", "concentrated", "sorted", "subnormal", "few-distinct")


@dataclass(frozen=True)
class IndexLogits(Problem, operation="index_logits", pattern="q{rows}-k{keys}-h{heads}"):
    """Index logits of e4m3 keys: the last ``rows`` queries of ``keys`` tokens, each over the keys up to its own.

    Attributes:
        ranges: a random range of keys for each query instead.
        clean: fill columns outside a query's range with -inf.
        dtype: dtype of the logits, "fp32" or "bf16".
    """

    rows: int
    keys: int
    heads: int
    head_dim: int = named(128, "-d{}")
    ranges: bool = named(False, "-ranges")
    clean: bool = named(False, "-clean")
    dtype: str = named("fp32", "-{}")


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
class PagedIndexLogits(Problem, operation="paged_index_logits", pattern="b{batch}-n{next_n}-k{keys}-h{heads}"):
    """Index logits over a cache: ``next_n`` query tokens of each of ``batch`` requests of ``keys`` tokens.

    Attributes:
        varlen: random lengths of up to ``keys``.
        clean, dtype: as in ``IndexLogits``.
    """

    batch: int
    keys: int
    next_n: int = 1
    heads: int = 64
    page_size: int = named(64, "-p{}")
    head_dim: int = named(128, "-d{}")
    varlen: bool = named(False, "-varlen")
    clean: bool = named(False, "-clean")
    dtype: str = named("fp32", "-{}")


@dataclass(frozen=True)
class SparseIndexLogits(
    Problem, operation="sparse_index_logits", pattern="q{rows}-k{keys}-blocks{blocks}x{block_size}-h{heads}"
):
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
    page_size: int = named(64, "-p{}")
    head_dim: int = named(128, "-d{}")
    dtype: str = named("bf16", "-{}")


@dataclass(frozen=True)
class IndexSelect(Problem, operation="index_select", pattern="{logits.name}-top{k}"):
    """The ``k`` keys with the largest of these logits, with a workspace of ``workspace_mib`` MiB for logits."""

    logits: IndexLogits
    k: int = 2048
    workspace_mib: int = named(512, "-workspace{}")


@dataclass(frozen=True)
class PagedIndexSelect(Problem, operation="paged_index_select", pattern="{logits.name}-top{k}-slots"):
    """``IndexSelect`` over a cache, with the result as slots of the cache."""

    logits: PagedIndexLogits
    k: int = 2048


@dataclass(frozen=True)
class TopK(Problem, operation="topk", pattern="r{rows}-w{width}-top{k}"):
    """The ``k`` largest values of each of ``rows`` rows of ``width``.

    Attributes:
        values: the distribution of a row's values, one of ``ROW_VALUES``; all except normal values are hard cases.
        page_size: tokens in a page, if the results are slots of pages in random order; 0: they are columns.
    """

    rows: int
    width: int
    k: int = 2048
    values: str = named("normal", "-{}")
    page_size: int = named(0, "-slots-p{}")
