"""Test cases of ``paged_attention``, in the style of ``flashlatte.testing.cases``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from flashlatte.kv_cache.fp8 import raw_view, to_e4m3
from flashlatte.testing.draws import Draw, PagedRequests, with_gaps

Layout = Literal["nhd", "hnd", "split"]
ScaleKind = Literal["number", "tensor", "head", "token"]

_PIECE_BYTES = 16
_CHUNK_PAGES = 4096


@dataclass(frozen=True)
class PagedAttentionCase:
    """Arguments of ``paged_attention``.

    Attributes:
        s_q: queries of a request, or their mean if ``varlen``: N(s_q, s_q / 2), at least 1.
        context: keys of a request before its queries, or their mean if ``varlen``, at least 0.
        new_keys: pass keys and values of the query tokens as k and v instead of in the cache.
        s_k: number of keys of a request in its pages; context plus queries if None.
        zero_lengths: give about half of the requests no queries.
        decodes: number of requests with one query before the others.
        unowned: number of tokens before the first and after the last request.
        layout: memory layout of a page: "nhd", "hnd", or "split" (K in pieces of 16 bytes and transposed V, the layout
            of vLLM's first kernels).
        cache_dtype: dtype of the cache; q's if None. Other dtypes add scales of ``scale_kind``.
        prefix_ranges, qq_bias: number of ranges of a request, and size of the bias; 0 for none.
        sinks, alibi: whether to pass sinks, and which kind of ALiBi.
        fp8_out: pass an out_scale.
    """

    batch: int
    s_q: int
    context: int
    h_q: int
    h_kv: int
    head_dim: int = 128
    d_v: int = 128
    page_size: int = 16
    causal: bool = True
    window: int | tuple[int, int] | None = None
    new_keys: bool = False
    s_k: int | None = None
    varlen: bool = False
    zero_lengths: bool = False
    decodes: int = 0
    unowned: int = 0
    layout: Layout = "nhd"
    strided: bool = False
    cache_dtype: torch.dtype | None = None
    scale_kind: ScaleKind = "number"
    softcap: float = 0.0
    prefix_ranges: int = 0
    qq_bias: int = 0
    sinks: bool = False
    alibi: Literal["none", "linear", "sqrt"] = "none"
    fp8_out: bool = False
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        draw = Draw(self.seed, device)
        queries = [1] * self.decodes
        queries += draw.lengths(self.batch, self.s_q, 1, self.varlen, self.zero_lengths)
        context = draw.lengths(len(queries), self.context, 0, self.varlen, False)
        in_pages = [c + (0 if self.new_keys else s) for c, s in zip(context, queries, strict=True)]
        if self.s_k is not None:
            in_pages = [self.s_k] * len(queries)
        paged = draw.pages(in_pages, self.page_size)
        tokens = sum(queries) + 2 * self.unowned
        q = draw.normal(tokens, self.h_q, self.head_dim, dtype=self.dtype, factor=1.0)
        arguments: dict[str, Any] = {
            "q": with_gaps(q) if self.strided else q,
            "block_table": torch.tensor(paged.table, dtype=self.index_dtype, device=device),
            "seqused_k": torch.tensor(in_pages, dtype=self.index_dtype, device=device),
            "cu_seqlens_q": torch.tensor([self.unowned, *queries]).cumsum(dim=0).to(device, self.index_dtype),
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
        }
        for name, width, factor in (("k", self.head_dim, 1.0), ("v", self.d_v, 0.1)):
            arguments |= self._cache(draw, paged, name, width, factor)
            if self.new_keys:
                arguments[name] = draw.normal(tokens, self.h_kv, width, dtype=self.dtype, factor=factor)
        return arguments | self._terms(draw, in_pages, device)

    def _cache(self, draw: Draw, paged: PagedRequests, name: str, width: int, factor: float) -> dict[str, Any]:
        """A cache with NaN where no request has a key, and its scale."""
        pages = len(paged.tokens_in_page)
        rows = draw.normal(pages, self.page_size, self.h_kv, width, dtype=torch.float32, factor=factor)
        written = torch.arange(self.page_size) < torch.tensor(paged.tokens_in_page)[:, None]  # [pages, page_size]
        unwritten = ~written.to(rows.device)
        arguments: dict[str, Any] = {}
        dtype = self.cache_dtype or self.dtype
        if self.cache_dtype is None:
            cache = rows.to(dtype)
            cache[unwritten] = torch.nan
        else:
            scale = self._scale(draw, factor, unwritten)
            factors = scale.unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale
            # In place: a cache of 2^31 elements and its quotient do not fit a GPU that tests share.
            cache = _quantized(rows.div_(factors), dtype)
            if dtype != torch.int8:
                raw_view(cache)[unwritten] = 0x7F  # NaN in both kinds of fp8
            arguments[f"{name}_scale"] = scale
        return arguments | {f"{name}_cache": self._laid_out(cache, is_key=name == "k")}

    def _scale(self, draw: Draw, factor: float, unwritten: torch.Tensor) -> float | torch.Tensor:
        """A scale with which e4m3 and int8 represent most values, with NaN for slots that are not written."""
        largest = factor / 24
        if self.scale_kind == "number":
            return largest
        shapes = {"tensor": (1,), "head": (self.h_kv,), "token": (*unwritten.shape, self.h_kv)}
        scale = largest * (0.5 + draw.uniform(*shapes[self.scale_kind]))
        return scale.masked_fill(unwritten[..., None], torch.nan) if self.scale_kind == "token" else scale

    def _laid_out(self, cache: torch.Tensor, is_key: bool) -> torch.Tensor:
        if self.layout == "hnd":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        elif self.layout == "split" and is_key:
            pieces = cache.unflatten(3, (-1, _PIECE_BYTES // cache.element_size()))
            return pieces.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        elif self.layout == "split":
            cache = cache.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return cache

    def _terms(self, draw: Draw, lengths: list[int], device: torch.device | str) -> dict[str, Any]:
        terms: dict[str, Any] = {}
        if self.prefix_ranges:
            limit = max(*lengths, 1)
            ranges = draw.integers(-2, limit + 3, len(lengths), self.prefix_ranges, 2)
            terms["prefix_ranges"] = ranges.to(self.index_dtype)
        if self.alibi != "none":
            terms["alibi_slopes"] = 2.0 ** -torch.arange(1, self.h_q + 1, device=device)
            terms["alibi_sqrt"] = self.alibi == "sqrt"
        if self.qq_bias:
            bias = draw.normal(self.qq_bias, self.qq_bias, dtype=torch.float32, factor=1.0)
            terms["qq_bias"] = bias.masked_fill(draw.uniform(self.qq_bias, self.qq_bias) < 0.3, -torch.inf)
        if self.sinks:
            terms["attn_sink"] = draw.sinks(self.h_q)
        if self.fp8_out:
            terms["out_scale"] = 0.01
        return terms


def _quantized(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cache = torch.empty_like(rows, dtype=dtype)
    # In chunks of pages, to save memory.
    for chunk, values in zip(cache.split(_CHUNK_PAGES), rows.split(_CHUNK_PAGES), strict=True):
        if dtype == torch.int8:
            chunk.copy_(values.round().clamp(-127, 127))
        else:
            chunk.copy_(to_e4m3(values) if dtype == torch.float8_e4m3fn else values)
    return cache
