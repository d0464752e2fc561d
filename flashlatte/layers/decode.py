"""Attention in absorbed form over the pages: through which operation, and that call."""

from __future__ import annotations

import torch

from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import DecodePart
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import checks, dispatch

OPERATION = "layer.decode"

# ``dense_decode`` reads the formats with one scale or none. To read v32 or model1 through it would take a dequantised
# copy of the whole history at every step; ``sparse_decode`` reads their bytes, given the slots of every token.
dispatch.register(
    OPERATION,
    dispatch.Implementation(
        "dense_decode",
        "flashlatte.layers.decode:attend_all",
        checks.FLOAT_DTYPES,
        cache_formats=("bf16", "fp16", "fp32", "fp8"),
        sparse=False,
    ),
    dispatch.Implementation(
        "sparse_decode_of_all",
        "flashlatte.layers.decode:attend_every_slot",
        checks.FLOAT_DTYPES,
        cache_formats=("v32", "model1"),
        sparse=False,
    ),
    dispatch.Implementation(
        "sparse_decode",
        "flashlatte.layers.decode:attend_selected",
        checks.FLOAT_DTYPES,
        cache_formats=("bf16", "fp16", "fp32", "v32", "model1"),
        sparse=True,
    ),
)


def attend_pages(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart | None,
    indices: torch.Tensor | None,
    softmax_scale: float,
    backend: str | None,
) -> torch.Tensor:
    """Attention of queries [T, h, head_dim] over cached tokens, their own among them: [T, h, value_dim].

    Args:
        part: whose the queries are; None beside ``indices``.
        indices: int [T, topk], the slots that each query attends to; None: all of its request up to its own.
        backend: of the operation that reads the pages.
    """
    call = dispatch.Call(
        OPERATION,
        query.device,
        query.dtype,
        cache_format=cache.layout.name,
        page_size=cache.page_size,
        head_dim=query.shape[2],
        head_dim_v=cache.value_dim,
        h_q=query.shape[1],
        h_kv=1,
        sparse=indices is not None,
    )
    run = dispatch.implementation(OPERATION, dispatch.select(call))
    return run(query, cache, part, indices, softmax_scale, backend)


def attend_all(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart,
    indices: None,
    softmax_scale: float,
    backend: str | None,
) -> torch.Tensor:
    out, _ = dense_decode(
        _by_request(query, part),
        cache.pages,
        part.block_table,
        part.seq_lens,
        head_dim_v=cache.value_dim,
        softmax_scale=softmax_scale,
        causal=part.queries > 1,
        k_scale=cache.scale,
        backend=backend,
    )
    return _by_token(out, part)


def attend_every_slot(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart,
    indices: None,
    softmax_scale: float,
    backend: str | None,
) -> torch.Tensor:
    if part.every_slot is None:
        raise ValueError(
            f"metadata must be built for the cache's format {cache.layout.name}: MLAMetadataBuilder(cache_format=…)"
        )
    out, _ = sparse_decode(
        _by_request(query, part),
        cache.pages,
        part.every_slot[:, None].expand(-1, part.queries, -1),
        cache_format=cache.layout,
        topk_length=part.seen,
        softmax_scale=softmax_scale,
        head_dim_v=cache.value_dim,
        backend=backend,
    )
    return _by_token(out, part)


def attend_selected(
    query: torch.Tensor,
    cache: LatentCache,
    part: DecodePart | None,
    indices: torch.Tensor,
    softmax_scale: float,
    backend: str | None,
) -> torch.Tensor:
    out, _ = sparse_decode(
        query[:, None],
        cache.pages,
        indices[:, None],
        cache_format=cache.layout,
        softmax_scale=softmax_scale,
        head_dim_v=cache.value_dim,
        backend=backend,
    )
    return out.squeeze(1)


def _by_request(query: torch.Tensor, part: DecodePart) -> torch.Tensor:
    """[requests, queries, h, head_dim]."""
    if part.padded is not None:
        query = query[part.padded]
    return query.view(part.requests, part.queries, *query.shape[1:])


def _by_token(out: torch.Tensor, part: DecodePart) -> torch.Tensor:
    out = out.flatten(0, 1)
    return out if part.places is None else out[part.places]
