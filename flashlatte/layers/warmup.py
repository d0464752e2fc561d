"""Runs the step shapes of a model's attention, to compile or list the kernels that they launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashlatte import kv_cache
from flashlatte.kv_cache.index_formats import index_format_beside
from flashlatte.kv_cache.registry import format_of_rows
from flashlatte.layers.absorbed import attend_selected, attend_selected_rows
from flashlatte.layers.attention import MLAAttention
from flashlatte.layers.builder import MLAMetadataBuilder
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import MLAConfig
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import machine

# Lengths of a short request, whose history needs few splits, and of a long one.
FEW_TOKENS, MANY_TOKENS = 256, 32_768
_NEW_TOKENS = 48
# From this many query tokens per SM on, sparse prefill may put neighboring tokens into one tile.
_TOKENS_PER_SM = 4


def warmup_steps(
    config: MLAConfig,
    *,
    cache_format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    heads: int | None = None,
    page_size: int = 64,
    max_batch: int = 256,
    max_queries: int = 2,
    decode_precision: str | None = None,
    device: str = "cpu",
) -> Iterator[str]:
    """Run a layer's prefill and decode steps; yields the name of each. Weights and results are uninitialized.

    Also attention as vLLM, SGLang and FlashInfer call it, with the queries in two tensors: dense decode, or with an
    indexer sparse attention.

    Args:
        cache_format: format of the latents; index keys have the matching format.
        dtype: dtype of the weights.
        heads: heads of this rank; None: all.
        page_size: tokens in a page.
        max_batch: maximum number of requests of a decode step.
        max_queries: maximum number of new tokens of a request in a decode step, including speculative tokens.
        decode_precision: as for ``MLAAttention``.
        device: device to run on; "cpu" inside ``runtime.precompile.collected``, which needs no GPU.

    Raises:
        ValueError: a format or precision that does not fit the layer, or more heads than it has.
    """
    max_length = min(MANY_TOKENS, config.rope.max_position)
    config = replace(config, rope=replace(config.rope, max_position=max_length))
    shard = None if heads is None else (0, heads)
    layer = MLAAttention(config, heads=shard, decode_precision=decode_precision, dtype=dtype, device=device)
    caches = _caches(config, cache_format, page_size, device)
    topk = None if config.indexer is None else config.indexer.topk
    chunk = min(_TOKENS_PER_SM * machine.num_sms(torch.device(device)), max_length)
    layout = format_of_rows(cache_format, config.kv_lora_rank, config.qk_rope_head_dim)
    queries = config.num_attention_heads if heads is None else heads, dtype
    # vLLM has no MLA layers with a window.
    dense = topk is None and config.window is None and layout.plain and config.qk_rope_head_dim > 0
    for length in sorted({min(FEW_TOKENS, max_length), max_length}):
        builder = MLAMetadataBuilder(
            page_size,
            max(max_batch, 3),
            max(max_batch * max_queries, _NEW_TOKENS, chunk),
            length,
            device,
            cache_format=cache_format,
            workspace_tokens=FEW_TOKENS,
            max_decode_queries=max_queries,
            topk=topk,
            windows=() if config.window is None else (config.window,),
        )
        steps = _steps(length, max_batch, max_queries)
        if topk is not None and length == max_length:
            large_prefill = ("prefill of many tokens", [chunk], [min(max(2 * topk, chunk), max_length)])
            steps = itertools.chain([large_prefill], steps)
        for name, query_lens, seq_lens in steps:
            yield f"{name}, requests of {max(seq_lens)} tokens"
            starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
            # All requests may share pages, since results are not used.
            table = torch.zeros(len(query_lens), builder.max_pages, dtype=torch.int32, device=device)
            metadata = builder.build(starts, seq_lens, table)
            hidden = torch.zeros(starts[-1], config.hidden_size, dtype=dtype, device=device)
            with NoArithmetic():
                layer(hidden, caches[0], metadata, index_cache=caches[1])
        if dense:
            scales: list[torch.Tensor | float | None] = [None]
            if layout.takes_scale:
                # vLLM's scale of an e4m3 cache is a tensor, and FlashInfer's a number, with exact products.
                scales = [torch.ones((), device=device), *([1.0] if decode_precision is None else [])]
            sizes = [(batch, count) for count in range(1, max_queries + 1) for batch in batches_up_to(max_batch)]
            for scale in scales:
                cache = LatentCache(caches[0], layout, config.kv_lora_rank, scale)
                yield from _dense_plugin_steps(config, *queries, cache, builder.max_pages, sizes, decode_precision)
    if topk is not None and config.qk_rope_head_dim:
        cache = LatentCache(caches[0], layout, config.kv_lora_rank)
        sizes = (batch * count for batch in batches_up_to(max_batch) for count in range(1, max_queries + 1))
        yield from _sparse_plugin_steps(config, *queries, cache, topk, sorted(set(sizes)), (_NEW_TOKENS, chunk))


def _dense_plugin_steps(
    config: MLAConfig,
    heads: int,
    dtype: torch.dtype,
    cache: LatentCache,
    max_pages: int,
    decodes: Iterable[tuple[int, int]],
    decode_precision: str | None,
) -> Iterator[str]:
    """Dense decode as vLLM's backend and FlashInfer's wrapper call it: the parts of the queries are in two tensors.

    ``decodes``: (requests, new tokens of each request).
    """
    device = cache.pages.device
    for batch, count in decodes:
        yield f"decode of {batch} x {count} with queries in two tensors"
        query, query_rope = _two_tensors(config, heads, cache.query_dtype(dtype), batch * count, device)
        dense_decode(
            query.unflatten(0, (batch, count)),
            cache.pages,
            torch.zeros(batch, max_pages, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            q_rope=query_rope.unflatten(0, (batch, count)),
            head_dim_v=cache.value_dim,
            softmax_scale=1.0,
            causal=True,
            k_scale=cache.scale,
            precision=decode_precision,
        )


def _sparse_plugin_steps(
    config: MLAConfig,
    heads: int,
    dtype: torch.dtype,
    cache: LatentCache,
    topk: int,
    decodes: Iterable[int],
    prefills: Iterable[int],
) -> Iterator[str]:
    """Sparse attention as vLLM's and SGLang's backends call it: the parts of the queries are in two tensors.

    ``decodes``, ``prefills``: numbers of query tokens.
    """
    device = cache.pages.device
    sink = torch.zeros(heads, device=device) if config.attn_sink else None
    dtype = cache.query_dtype(dtype)
    rows = cache.pages.flatten(0, 1) if cache.layout.plain else None
    for tokens, in_prompt in (*((count, False) for count in decodes), *((count, True) for count in prefills)):
        yield f"{'prefill' if in_prompt else 'decode'} of {tokens} with queries in two tensors"
        query, query_rope = _two_tensors(config, heads, dtype, tokens, device)
        indices = torch.zeros(tokens, topk, dtype=torch.int32, device=device)
        if in_prompt:
            attend_selected_rows(query, cache, rows, indices, 1.0, None, sink, query_rope)
            continue
        attend_selected(query, cache, indices, 1.0, None, sink=sink, query_rope=query_rope)
        if cache.layout.plain:  # SGLang joins the parts for caches in other formats.
            sparse_decode(
                query[:, None],
                cache.pages,
                indices[:, None],
                q_rope=query_rope[:, None],
                topk_length=torch.zeros(tokens, dtype=torch.int32, device=device),
                softmax_scale=1.0,
                head_dim_v=cache.value_dim,
            )


def _two_tensors(
    config: MLAConfig, heads: int, dtype: torch.dtype, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [tokens, heads, latent] and [tokens, heads, rope], with the strides of vLLM's."""
    nope = config.qk_nope_head_dim
    query = torch.empty(heads, tokens, config.kv_lora_rank, dtype=dtype, device=device).transpose(0, 1)
    query_rope = torch.empty(tokens, heads, nope + config.qk_rope_head_dim, dtype=dtype, device=device)[..., nope:]
    return query, query_rope


def _steps(length: int, max_batch: int, max_queries: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """(name, new tokens of each request, all tokens of each request)."""
    yield "prefill", [_NEW_TOKENS], [_NEW_TOKENS]
    yield "prefill with a prefix in the cache", [_NEW_TOKENS], [min(length, 3 * FEW_TOKENS)]
    if length > 3 * FEW_TOKENS:
        yield "prefill of a long request", [_NEW_TOKENS], [length]
    # The decode token misaligns the prefill part within the step's buffers.
    yield "decode of 1 with two prefills", [1, _NEW_TOKENS - 8, 7], [length, length, 7]
    for queries in range(1, max_queries + 1):
        for batch in batches_up_to(max_batch):
            yield f"decode of {batch} x {queries}", [queries] * batch, [length] * batch


def batches_up_to(max_batch: int) -> list[int]:
    """Sizes of decode steps that cover all kernel choices: powers of two, and ``max_batch``."""
    return sorted({1 << exponent for exponent in range(max_batch.bit_length())} | {max_batch})


def _caches(
    config: MLAConfig, cache_format: str, page_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache of one page for latents, and for index keys if the layer has an indexer."""
    layout = format_of_rows(cache_format, config.kv_lora_rank, config.qk_rope_head_dim)
    latents = kv_cache.allocate(layout, 1, page_size, device=device)
    if config.indexer is None:
        return latents, None
    keys = kv_cache.get_format(index_format_beside(layout), config.indexer.head_dim)
    return latents, kv_cache.allocate(keys, 1, page_size, device=device)


class NoArithmetic(TorchDispatchMode):
    """Replaces matrix products by empty tensors of the result's shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            first, second = args[-2:] if func is torch.ops.aten.addmm.default else args[:2]
            width = second.shape[0] if func is torch.ops.aten.linear.default else second.shape[-1]
            return first.new_empty(*first.shape[:-1], width)
        if func in _PRODUCTS_INTO:
            return (kwargs or {})["out"]
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
}
_PRODUCTS_INTO = {torch.ops.aten.mm.out, torch.ops.aten.bmm.out}
