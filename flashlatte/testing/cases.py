"""Test cases of the operations. The fields of a case describe its inputs; ``inputs`` generates them from the seed.

The data follow FlashMLA's tests (commit 9241ae3): keys are about randn / 10, pages are in random order, cache rows that
no query attends to are NaN, and unused entries of the block table are far out of range. ``inputs`` returns keyword
arguments for an operation and for its oracle in ``flashlatte.testing.oracles``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from flashlatte import kv_cache
from flashlatte.ops.cache_write import cache_write
from flashlatte.testing.draws import Draw, in_two_parts, selection_mask, with_gaps

TopkLengths = Literal["all", "request", "token"]

FP8_SCALE = 0.02
WRITE_CHUNK_ROWS = 2**16


@dataclass(frozen=True)
class DenseDecodeCase:
    """Arguments of ``dense_decode``.

    Attributes:
        s_k: keys of a request, or their mean if ``varlen``: N(s_k, s_k / 2), at least s_q.
        zero_lengths: make about half of the requests empty.
        strided: put gaps of NaN between the heads of q and between the pages of the cache.
        separate_rope: pass the columns of q after ``head_dim_v``, if any, as q_rope.
        cache_dtype: dtype of the cache; q's if None. torch.float8_e4m3fn adds a k_scale.
    """

    batch: int
    s_q: int
    s_k: int
    h_q: int
    h_kv: int = 1
    head_dim: int = 576
    head_dim_v: int = 512
    page_size: int = 64
    varlen: bool = False
    causal: bool = False
    zero_lengths: bool = False
    strided: bool = False
    separate_rope: bool = False
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        draw = Draw(self.seed, device)
        lengths = draw.lengths(self.batch, self.s_k, self.s_q, self.varlen, self.zero_lengths)
        paged = draw.pages(lengths, self.page_size)
        q = draw.normal(self.batch, self.s_q, self.h_q, self.head_dim, dtype=self.dtype)

        row_count = self.page_size + (1 if self.strided else 0)
        rows = draw.normal(len(paged.tokens_in_page), row_count, self.h_kv, self.head_dim, dtype=self.dtype)
        tokens_in_page = torch.tensor(paged.tokens_in_page, device=device)
        rows[torch.arange(row_count, device=device) >= tokens_in_page[:, None]] = torch.nan
        quantized = self.cache_dtype == torch.float8_e4m3fn
        cache = (rows / FP8_SCALE).to(torch.float8_e4m3fn) if quantized else rows
        queries = {"q": with_gaps(q) if self.strided else q}
        return {
            **(in_two_parts(q, self.head_dim_v) if self.separate_rope and self.head_dim > self.head_dim_v else queries),
            "k_cache": cache[:, : self.page_size],
            "block_table": torch.tensor(paged.table, dtype=self.index_dtype, device=device),
            "cache_seqlens": torch.tensor(lengths, dtype=self.index_dtype, device=device),
            "head_dim_v": self.head_dim_v,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "k_scale": FP8_SCALE if quantized else None,
        }


@dataclass(frozen=True)
class SparseDecodeCase:
    """Arguments of ``sparse_decode``.

    Every query token selects distinct tokens of its request. Invalid indices of several kinds fill the row if the
    request has fewer than ``topk`` tokens, and replace the fraction ``invalid_share`` of the others.

    Attributes:
        s_k: tokens of a request in the cache, or their mean if ``varlen``: N(s_k, s_k / 2), at least 1.
        head_dim: for formats without a fixed head dim (bf16, fp16, fp32).
        extra_topk: number of indices into a second cache; 0 for none.
        topk_lengths: "all" for no topk_length, "request" for shape [b], "token" for [b, s_q]; values from 0 to topk.
        duplicates: select every token twice.
        empty_rows: fraction of query tokens with only invalid indices.
        zero_lengths: make about half of the requests empty.
        strided: put gaps between the heads of q, the rows of the indices and the pages of the caches.
        rope: width of the rotated part of the queries in a tensor of its own; 0 if q has it.
        softmax_scale: d^-0.55 if None.
    """

    batch: int
    s_q: int
    s_k: int
    h_q: int
    topk: int
    cache_format: str = "v32"
    page_size: int = 64
    head_dim: int | None = None
    head_dim_v: int = 512
    extra_topk: int = 0
    extra_s_k: int = 0
    extra_page_size: int = 64
    varlen: bool = False
    topk_lengths: TopkLengths = "all"
    extra_topk_lengths: TopkLengths = "all"
    attn_sink: bool = True
    duplicates: bool = False
    invalid_share: float = 0.1
    empty_rows: float = 0.0
    zero_lengths: bool = False
    strided: bool = False
    rope: int = 0
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        draw = Draw(self.seed, device)
        layout = kv_cache.get_format(self.cache_format, self.head_dim)
        q = draw.normal(self.batch, self.s_q, self.h_q, layout.head_dim, dtype=self.dtype, factor=1.0)
        k_cache, indices, topk_length = self._scope(draw, self.topk, self.s_k, self.page_size, self.topk_lengths)
        arguments = {
            **_queries(q, self.rope, self.strided),
            "k_cache": k_cache,
            "indices": indices,
            "cache_format": layout,
            "topk_length": topk_length,
            "attn_sink": draw.sinks(self.h_q) if self.attn_sink else None,
            "softmax_scale": layout.head_dim**-0.55 if self.softmax_scale is None else self.softmax_scale,
            "head_dim_v": self.head_dim_v,
        }
        if self.extra_topk:
            extra = self._scope(draw, self.extra_topk, self.extra_s_k, self.extra_page_size, self.extra_topk_lengths)
            arguments |= zip(("extra_k_cache", "extra_indices", "extra_topk_length"), extra, strict=True)
        return arguments

    def _scope(
        self, draw: Draw, topk: int, s_k: int, page_size: int, topk_lengths: TopkLengths
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A cache, indices into it, and topk_length."""
        paged = draw.pages(draw.lengths(self.batch, s_k, 1, self.varlen, self.zero_lengths), page_size)
        limit = len(paged.tokens_in_page) * page_size
        slots = []
        for length, pages in zip(paged.lengths, paged.table, strict=True):
            tokens = draw.choices(self.s_q, topk, length, self.duplicates)
            page = torch.tensor(pages, device=draw.device)[tokens.clamp_min(0) // page_size]
            slots.append(torch.where(tokens < 0, -1, page * page_size + tokens % page_size))
        indices = draw.drop(torch.stack(slots), self.invalid_share, self.empty_rows)
        indices = draw.fill_invalid(indices, limit, self.index_dtype)

        topk_length = None
        if topk_lengths != "all":
            shape = (self.batch,) if topk_lengths == "request" else (self.batch, self.s_q)
            topk_length = draw.integers(0, topk + 1, *shape).to(self.index_dtype)
        selected = indices[selection_mask(indices, limit, topk_length)].long()
        cache = self._cache(draw, limit // page_size, page_size, selected)
        return cache, with_gaps(indices) if self.strided else indices, topk_length

    def _cache(self, draw: Draw, num_pages: int, page_size: int, selected: torch.Tensor) -> torch.Tensor:
        """A cache with randn / 10 in the selected slots and NaN in all others."""
        layout = kv_cache.get_format(self.cache_format, self.head_dim)
        cache = kv_cache.allocate(layout, num_pages, page_size + (1 if self.strided else 0), device=draw.device)
        cache = cache.fill_(torch.nan if cache.is_floating_point() else 0xFF)[:, :page_size]
        slots = selected.unique()
        dtype = layout.record_dtype if layout.plain else self.dtype
        for chunk in slots.split(WRITE_CHUNK_ROWS):
            rows = draw.normal(chunk.shape[0], layout.head_dim, dtype=dtype)
            cache_write(cache, chunk, rows, cache_format=layout, backend="reference")
        return cache


@dataclass(frozen=True)
class SparsePrefillCase:
    """Arguments of ``sparse_prefill``; fields as in ``SparseDecodeCase``.

    Attributes:
        topk_lengths: whether to pass a topk_length [s_q], values from 0 to topk.
        strided: put gaps between the rows of q, kv and the indices.
        rope: width of the rotated part of the queries in a tensor of its own; 0 if q has it.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    head_dim: int = 576
    d_v: int = 512
    topk_lengths: bool = False
    attn_sink: bool = True
    duplicates: bool = False
    invalid_share: float = 0.1
    empty_rows: float = 0.0
    strided: bool = False
    rope: int = 0
    softmax_scale: float = 0.5
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        draw = Draw(self.seed, device)
        q = draw.normal(self.s_q, self.h_q, self.head_dim, dtype=self.dtype, offset=0.05)
        kv = draw.normal(self.s_kv, 1, self.head_dim, dtype=self.dtype, offset=-0.05)
        indices = draw.choices(self.s_q, self.topk, self.s_kv, self.duplicates)
        indices = draw.drop(indices, self.invalid_share, self.empty_rows)
        indices = draw.fill_invalid(indices, self.s_kv, self.index_dtype).unsqueeze(1)
        topk_length = draw.integers(0, self.topk + 1, self.s_q).to(self.index_dtype) if self.topk_lengths else None

        unselected = torch.ones(self.s_kv, dtype=torch.bool, device=device)
        unselected[indices[selection_mask(indices, self.s_kv, topk_length)].long()] = False
        kv[unselected] = torch.nan
        return {
            **_queries(q, self.rope, self.strided),
            "kv": with_gaps(kv) if self.strided else kv,
            "indices": with_gaps(indices) if self.strided else indices,
            "softmax_scale": self.softmax_scale,
            "d_v": self.d_v,
            "attn_sink": draw.sinks(self.h_q) if self.attn_sink else None,
            "topk_length": topk_length,
        }


@dataclass(frozen=True)
class DensePrefillCase:
    """Arguments of ``dense_prefill``.

    Attributes:
        s_q, s_k: queries and keys of a request, or their means if ``varlen``: N(s, s / 2), at least 1.
        equal: every request has the same number of keys as queries; s_k is ignored.
        zero_lengths: give about half of the requests no queries, and about half no keys.
        unowned: number of tokens before the first and after the last request, with NaN.
        strided: k and v are views of one tensor, and q has gaps of NaN between its heads.
        softmax_scale: (head_dim + 100)^-0.5 if None, as in FlashMLA's tests.
    """

    batch: int
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    head_dim: int = 192
    d_v: int = 128
    causal: bool = False
    window: int | tuple[int, int] | None = None
    varlen: bool = False
    equal: bool = False
    zero_lengths: bool = False
    unowned: int = 0
    strided: bool = False
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        draw = Draw(self.seed, device)
        lengths_q = draw.lengths(self.batch, self.s_q, 1, self.varlen, self.zero_lengths)
        lengths_k = lengths_q
        if not self.equal:
            lengths_k = draw.lengths(self.batch, self.s_k, 1, self.varlen, self.zero_lengths)
        q = self._rows(draw, lengths_q, self.h_q, self.head_dim, 1.0)
        k = self._rows(draw, lengths_k, self.h_kv, self.head_dim, 1.0)
        v = self._rows(draw, lengths_k, self.h_kv, self.d_v, 0.1)
        if self.strided:
            q = with_gaps(q)
            k, v = torch.cat((k, v), dim=-1).split((self.head_dim, self.d_v), dim=-1)
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": self._boundaries(lengths_q, device),
            "cu_seqlens_k": self._boundaries(lengths_k, device),
            "max_seqlen_q": max(lengths_q),
            "max_seqlen_k": max(lengths_k),
            "softmax_scale": (self.head_dim + 100) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            "causal": self.causal,
            "window": self.window,
        }

    def _rows(self, draw: Draw, lengths: list[int], heads: int, width: int, factor: float) -> torch.Tensor:
        total = sum(lengths)
        rows = draw.normal(self.unowned + total + self.unowned, heads, width, dtype=self.dtype, factor=factor)
        rows[: self.unowned] = torch.nan
        rows[self.unowned + total :] = torch.nan
        return rows

    def _boundaries(self, lengths: list[int], device: torch.device | str) -> torch.Tensor:
        boundaries = torch.tensor([self.unowned, *lengths], dtype=torch.int64).cumsum(dim=0)
        return boundaries.to(device, self.index_dtype)


def _queries(q: torch.Tensor, rope: int, strided: bool) -> dict[str, torch.Tensor]:
    if rope:
        return in_two_parts(q, q.shape[-1] - rope, strided)
    return {"q": with_gaps(q) if strided else q}
