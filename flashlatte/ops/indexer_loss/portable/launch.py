"""From tensors to launches of the kernels: a few tokens at a time, as many as the scratch holds slots of."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from flashlatte.kernels.triton.config import AttentionConfig, StepConfig, choose
from flashlatte.kernels.triton.head_dims import tile_widths
from flashlatte.kernels.triton.key_sums import add_by_key, pieces
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.ops.indexer_loss.portable.config import ATTENTION, INDEX_KEYS, INDEX_QUERIES
from flashlatte.ops.indexer_loss.portable.gradient_kernels import (
    index_queries_kernel,
    range_keys_kernel,
    selected_keys_kernel,
)
from flashlatte.ops.indexer_loss.portable.loss_kernels import logits_kernel, loss_kernel, lse_kernel, target_kernel
from flashlatte.runtime.strides import row_align

# Of the target and of the index logits each.
SCRATCH_BYTES = 16 * 2**20
# Contributions to the gradient of index_k that exist at once where their sum is deterministic.
CONTRIBUTION_BYTES = 256 * 2**20
# Tokens whose contributions to the gradient of a tile of index keys one program sums.
_GROUP = 128
# Slots for which one program sums probabilities or index scores of all heads, a multiple of every block_n.
_SPLIT = 2048
_LOSS_BLOCK = 1024


def loss_and_gradients(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    lse: torch.Tensor | None,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    softmax_scale: float,
    index_scale: float,
    use_relu: bool,
    deterministic: bool,
    loss: torch.Tensor,
    num_rows: torch.Tensor,
    d_index_q: torch.Tensor | None,
    d_index_k: torch.Tensor | None,
    d_index_weights: torch.Tensor | None,
) -> None:
    """The gradients are contiguous, all given or none; those of index_k and of index_weights are float32."""
    s_q, h_q, head_dim = q.shape
    h_i, index_dim = index_q.shape[1:]
    s_kv = kv.shape[0]
    width = s_kv if indices is None else indices.shape[2]
    device = q.device
    tiles = _tiles(gpu_class(device), h_q, head_dim, h_i, index_dim, indices is not None)
    slots = {
        "ranges": _slot_ranges(s_q, width, topk_length, key_start, key_end, device),
        "indices": indices,
        "indices_stride": 0 if indices is None else indices.stride(0),
        "s_q": s_q,
        "s_kv": s_kv,
        "width": width,
    }
    align = min(row_align(q), row_align(kv))
    attention: dict[str, Any] = slots | {
        "q": q,
        "q_stride_token": q.stride(0) // align,
        "q_stride_head": q.stride(1) // align,
        "kv": kv,
        "kv_stride": kv.stride(0) // align,
        "h_q": h_q,
        "softmax_scale": softmax_scale,
        "ALIGN": align,
    }
    align = min(row_align(index_q), row_align(index_k))
    indexer: dict[str, Any] = slots | {
        "index_q": index_q,
        "index_q_stride_token": index_q.stride(0) // align,
        "index_q_stride_head": index_q.stride(1) // align,
        "index_k": index_k,
        "index_k_stride": index_k.stride(0) // align,
        "index_weights": index_weights,
        "weights_stride": index_weights.stride(0),
        "h_i": h_i,
        "index_scale": index_scale,
        "USE_RELU": use_relu,
        "ALIGN": align,
    }
    if lse is None:
        lse = torch.empty(s_q, h_q, dtype=torch.float32, device=device)
        tile, step = tiles["attention"]
        grid = (s_q * -(-h_q // tile.block_h),)
        lse_kernel[grid](**attention, lse=lse, STEP=step, num_warps=tile.num_warps)

    losses = torch.empty(s_q, dtype=torch.float32, device=device)
    sees_keys = torch.empty(s_q, dtype=torch.int8, device=device)
    tokens_at_once = min(max(SCRATCH_BYTES // (4 * width), 1), s_q)
    target = torch.empty(tokens_at_once, width, dtype=torch.float32, device=device)
    logits = torch.empty_like(target)
    # Allocated once: while a call is recorded, no memory is reused within it.
    key_scratch: torch.Tensor | None = None
    if d_index_k is not None:
        d_index_k.zero_()
        if indices is None:
            key_scratch = d_index_k.new_empty(-(-tokens_at_once // _GROUP), *d_index_k.shape)
        elif deterministic:
            rows = min(CONTRIBUTION_BYTES // (4 * index_dim), tokens_at_once * width)
            key_scratch = d_index_k.new_empty(rows, index_dim)
    for first_token, tokens in _chunks(s_q, tokens_at_once):
        chunk = {"first_token": first_token}
        tile, step = tiles["attention"]
        target_kernel[(tokens * -(-width // _SPLIT),)](
            **attention,
            **chunk,
            lse=lse,
            lse_stride_token=lse.stride(0),
            lse_stride_head=lse.stride(1),
            target=target,
            SPLIT=_SPLIT,
            STEP=step,
            num_warps=tile.num_warps,
        )
        tile, step = tiles["index_queries"]
        grid = (tokens * -(-width // _SPLIT),)
        logits_kernel[grid](**indexer, **chunk, logits=logits, SPLIT=_SPLIT, STEP=step, num_warps=tile.num_warps)
        loss_kernel[(tokens,)](
            target=target,
            logits=logits,
            ranges=slots["ranges"],
            s_q=s_q,
            width=width,
            first_token=first_token,
            losses=losses,
            sees_keys=sees_keys,
            WITH_GRADIENT=d_index_q is not None,
            BLOCK=_LOSS_BLOCK,
            num_warps=4,
        )
        if d_index_q is None or d_index_k is None or d_index_weights is None:
            continue
        # The loss kernel put them in place of the logits.
        d_logits = logits
        tile, step = tiles["index_queries"]
        index_queries_kernel[(tokens * -(-h_i // tile.block_h),)](
            **indexer,
            **chunk,
            d_logits=d_logits,
            sees_keys=sees_keys,
            d_index_q=d_index_q,
            d_index_weights=d_index_weights,
            STEP=step,
            num_warps=tile.num_warps,
        )
        if indices is None:
            assert key_scratch is not None
            _add_gradient_of_ranges(indexer, tiles["index_keys"], first_token, tokens, d_logits, key_scratch, d_index_k)
        else:
            _add_gradient_of_selection(
                indexer, tiles["index_keys"], first_token, tokens, topk_length, d_logits, key_scratch, d_index_k
            )
    torch.sum(losses, dim=0, out=loss)
    torch.sum(sees_keys, dim=0, out=num_rows)


def _add_gradient_of_ranges(
    indexer: dict[str, Any],
    tiles: tuple[AttentionConfig, StepConfig],
    first_token: int,
    tokens: int,
    d_logits: torch.Tensor,
    scratch: torch.Tensor,
    d_index_k: torch.Tensor,
) -> None:
    tile, step = tiles
    groups = -(-tokens // _GROUP)
    by_group = scratch[:groups]
    of_slots = ("indices", "indices_stride", "width")
    range_keys_kernel[(groups * -(-d_index_k.shape[0] // tile.block_n),)](
        **{name: value for name, value in indexer.items() if name not in of_slots},
        first_token=first_token,
        tokens=tokens,
        d_logits=d_logits,
        d_index_k=by_group,
        GROUP=_GROUP,
        STEP=step,
        num_warps=tile.num_warps,
    )
    for group in by_group:
        d_index_k += group


def _add_gradient_of_selection(
    indexer: dict[str, Any],
    tiles: tuple[AttentionConfig, StepConfig],
    first_token: int,
    tokens: int,
    topk_length: torch.Tensor | None,
    d_logits: torch.Tensor,
    contributions: torch.Tensor | None,
    d_index_k: torch.Tensor,
) -> None:
    """``contributions``: scratch for a deterministic sum, or None."""
    tile, step = tiles
    indices: torch.Tensor = indexer["indices"]
    topk = indices.shape[2]
    scratch_rows = None if contributions is None else contributions.shape[0]
    for first_row, rows, first_slot, slots in pieces(tokens, topk, tile.block_n, scratch_rows):
        selected_keys_kernel[(rows * -(-slots // tile.block_n),)](
            **indexer,
            first_token=first_token,
            d_logits=d_logits,
            first_row=first_row,
            first_slot=first_slot,
            slots=slots,
            d_index_k=d_index_k if contributions is None else contributions,
            ATOMIC=contributions is None,
            STEP=step,
            num_warps=tile.num_warps,
        )
        if contributions is not None:
            piece = slice(first_token + first_row, first_token + first_row + rows)
            counted = indices[piece, 0, first_slot : first_slot + slots]
            lengths = None if topk_length is None else topk_length[piece]
            add_by_key(contributions, counted, first_slot, lengths, d_index_k)


def _slot_ranges(
    s_q: int,
    width: int,
    topk_length: torch.Tensor | None,
    key_start: torch.Tensor | None,
    key_end: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """[2, s_q] int32: the first slot of each token that counts, and the slot after the last one; within 0 to width."""
    ranges = torch.empty(2, s_q, dtype=torch.int32, device=device)
    for row, limit, default in (
        (ranges[0], key_start, 0),
        (ranges[1], topk_length if key_end is None else key_end, width),
    ):
        row.fill_(default) if limit is None else row.copy_(limit.clamp(0, width))
    return ranges


def _chunks(tokens: int, at_once: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each chunk."""
    for first in range(0, tokens, at_once):
        yield first, min(at_once, tokens - first)


@functools.lru_cache(maxsize=64)
def _tiles(
    gpu: str, h_q: int, head_dim: int, h_i: int, index_dim: int, selected: bool
) -> dict[str, tuple[AttentionConfig, StepConfig]]:
    """The configuration of each kernel, with its constants. A row of q is loaded as two tiles, of index_q as one."""
    first, second = tile_widths(head_dim)
    latent_dim = first if second else head_dim
    found = {
        "attention": choose(ATTENTION, gpu, h_q, head_dim, latent_dim, in_place=True),
        "index_keys": choose(INDEX_KEYS, gpu, h_i, index_dim, index_dim, in_place=True),
        "index_queries": choose(INDEX_QUERIES, gpu, h_i, index_dim, index_dim, in_place=True),
    }
    if not selected:
        # Of the stages of a loop over keys, one is that of their indices.
        for name in ("attention", "index_queries"):
            tile, step = found[name]
            found[name] = tile, step._replace(num_stages=min(step.num_stages, 2))
    return found
