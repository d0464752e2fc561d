"""From tensors to launches of the kernels: a few tokens at a time, as many as the scratch holds slots of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from flashlatte.kernels.triton.config import AttentionConfig, StepConfig, choose
from flashlatte.kernels.triton.head_dims import tile_widths
from flashlatte.kernels.triton.key_sums import KeySums, pieces
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.ops.indexer_loss.params import IndexerLossParams, IndexerLossResults
from flashlatte.ops.indexer_loss.portable.config import ATTENTION, INDEX_KEYS, INDEX_QUERIES
from flashlatte.ops.indexer_loss.portable.gradient_kernels import (
    index_queries_kernel,
    range_keys_kernel,
    selected_keys_kernel,
)
from flashlatte.ops.indexer_loss.portable.loss_kernels import logits_kernel, loss_kernel, lse_kernel, target_kernel
from flashlatte.ops.indexer_loss.seen_keys import AttentionRows, IndexerRows, SlotRanges
from flashlatte.runtime.process_groups import sum_over_ranks
from flashlatte.runtime.strides import row_align

# Of the target and of the index logits each.
SCRATCH_BYTES = 16 * 2**20
# Contributions to the gradient of index_k that exist at once where their sum is deterministic.
CONTRIBUTION_BYTES = 256 * 2**20
# Tokens whose contributions to the gradient of a tile of index keys one program sums.
_GROUP = 128
# Slots for which one program sums probabilities or index scores of all heads, a multiple of every block_n.
SPLIT = 2048
_LOSS_BLOCK = 1024
# Launches the target kernel: (params, slots, lse, first token, tokens, target).
SumProbabilities = Callable[[IndexerLossParams, SlotRanges, torch.Tensor, int, int, torch.Tensor], None]


def loss_and_gradients(
    params: IndexerLossParams, results: IndexerLossResults, sum_probabilities: SumProbabilities | None = None
) -> None:
    """``sum_probabilities`` launches the target kernel; the portable one if None."""
    sum_probabilities = sum_probabilities or _sum_probabilities
    q, kv, index_q = params.q, params.kv, params.index_q
    lse, indices, d_index_k = params.lse, params.indices, results.d_index_k
    s_q, h_q = q.shape[:2]
    h_i, index_dim = index_q.shape[1:]
    s_kv = kv.shape[0]
    width = s_kv if indices is None else indices.shape[2]
    device = q.device
    tiles = _tiles_of(params)
    indices_stride = 0 if indices is None else indices.stride(0)
    slots = SlotRanges(_slot_ranges(params, width), indices, indices_stride, s_q, s_kv, width)
    attention, indexer = _attention_rows(params), _indexer_rows(params)
    if lse is None:
        lse = torch.empty(s_q, h_q, dtype=torch.float32, device=device)
        tile, step = tiles["attention"]
        grid = (s_q * -(-h_q // tile.block_h),)
        lse_kernel[grid](slots, attention, lse=lse, STEP=step, num_warps=tile.num_warps)

    losses = torch.empty(s_q, dtype=torch.float32, device=device)
    sees_keys = torch.empty(s_q, dtype=torch.int8, device=device)
    tokens_at_once = min(max(SCRATCH_BYTES // (4 * width), 1), s_q)
    target = torch.empty(tokens_at_once, width, dtype=torch.float32, device=device)
    logits = torch.empty_like(target)
    # Allocated once: while a call is recorded, no memory is reused within it.
    key_scratch: torch.Tensor | None = None
    if params.with_gradient:
        d_index_k.zero_()
        if indices is None:
            key_scratch = d_index_k.new_empty(-(-tokens_at_once // _GROUP), *d_index_k.shape)
        elif params.deterministic:
            rows = min(CONTRIBUTION_BYTES // (4 * index_dim), tokens_at_once * width)
            key_scratch = d_index_k.new_empty(rows, index_dim)
    for first_token, tokens in _chunks(s_q, tokens_at_once):
        sum_probabilities(params, slots, lse, first_token, tokens, target)
        if params.group is not None:
            # Slots that do not count hold anything, on every rank.
            sum_over_ranks(target[:tokens], params.group)
        tile, step = tiles["index_queries"]
        grid = (tokens * -(-width // SPLIT),)
        logits_kernel[grid](
            slots, indexer, first_token=first_token, logits=logits, SPLIT=SPLIT, STEP=step, num_warps=tile.num_warps
        )
        loss_kernel[(tokens,)](
            slots,
            target=target,
            logits=logits,
            first_token=first_token,
            losses=losses,
            sees_keys=sees_keys,
            WITH_GRADIENT=params.with_gradient,
            BLOCK=_LOSS_BLOCK,
            num_warps=4,
        )
        if not params.with_gradient:
            continue
        # The loss kernel put them in place of the logits.
        d_logits = logits
        tile, step = tiles["index_queries"]
        index_queries_kernel[(tokens * -(-h_i // tile.block_h),)](
            slots,
            indexer,
            first_token=first_token,
            d_logits=d_logits,
            sees_keys=sees_keys,
            d_index_q=results.d_index_q,
            d_index_weights=results.d_index_weights,
            STEP=step,
            num_warps=tile.num_warps,
        )
        if indices is None:
            assert key_scratch is not None
            _add_gradient_of_ranges(
                slots, indexer, tiles["index_keys"], first_token, tokens, d_logits, key_scratch, d_index_k
            )
        else:
            _add_gradient_of_selection(
                slots,
                indexer,
                tiles["index_keys"],
                first_token,
                tokens,
                params.topk_length,
                d_logits,
                key_scratch,
                d_index_k,
            )
    torch.sum(losses, dim=0, out=results.loss)
    torch.sum(sees_keys, dim=0, out=results.num_rows)


def _sum_probabilities(
    params: IndexerLossParams, slots: SlotRanges, lse: torch.Tensor, first_token: int, tokens: int, target: torch.Tensor
) -> None:
    tile, step = _tiles_of(params)["attention"]
    target_kernel[(tokens * -(-slots.width // SPLIT),)](
        slots,
        _attention_rows(params),
        first_token=first_token,
        lse=lse,
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        target=target,
        SPLIT=SPLIT,
        STEP=step,
        num_warps=tile.num_warps,
    )


def _add_gradient_of_ranges(
    slots: SlotRanges,
    indexer: IndexerRows,
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
    range_keys_kernel[(groups * -(-d_index_k.shape[0] // tile.block_n),)](
        slots,
        indexer,
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
    slots: SlotRanges,
    indexer: IndexerRows,
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
    indices: torch.Tensor = slots.indices
    topk = indices.shape[2]
    scratch_rows = None if contributions is None else contributions.shape[0]
    launched = slice(first_token, first_token + tokens)
    key_sums = KeySums(indices[launched], None if topk_length is None else topk_length[launched], d_index_k)
    for first_row, rows, first_slot, num_slots in pieces(tokens, topk, tile.block_n, scratch_rows):
        selected_keys_kernel[(rows * -(-num_slots // tile.block_n),)](
            slots,
            indexer,
            first_token=first_token,
            d_logits=d_logits,
            first_row=first_row,
            first_slot=first_slot,
            num_slots=num_slots,
            d_index_k=d_index_k if contributions is None else contributions,
            ATOMIC=contributions is None,
            STEP=step,
            num_warps=tile.num_warps,
        )
        if contributions is not None:
            key_sums.add(contributions, first_row, rows, first_slot, num_slots)


def _attention_rows(params: IndexerLossParams) -> AttentionRows:
    q, kv = params.q, params.kv
    align = min(row_align(q), row_align(kv))
    strides = q.stride(0) // align, q.stride(1) // align
    return AttentionRows(q, *strides, kv, kv.stride(0) // align, q.shape[1], params.softmax_scale, align)


def _indexer_rows(params: IndexerLossParams) -> IndexerRows:
    index_q, index_k, weights = params.index_q, params.index_k, params.index_weights
    align = min(row_align(index_q), row_align(index_k))
    return IndexerRows(
        q=index_q,
        stride_token=index_q.stride(0) // align,
        stride_head=index_q.stride(1) // align,
        k=index_k,
        k_stride=index_k.stride(0) // align,
        weights=weights,
        weights_stride=weights.stride(0),
        h_i=index_q.shape[1],
        index_scale=params.index_scale,
        use_relu=params.use_relu,
        align=align,
    )


def _slot_ranges(params: IndexerLossParams, width: int) -> torch.Tensor:
    """``SlotRanges.ranges``, within 0 to width."""
    ranges = torch.empty(2, params.q.shape[0], dtype=torch.int32, device=params.q.device)
    for row, limit, default in (
        (ranges[0], params.key_start, 0),
        (ranges[1], params.topk_length if params.key_end is None else params.key_end, width),
    ):
        row.fill_(default) if limit is None else row.copy_(limit.clamp(0, width))
    return ranges


def _chunks(tokens: int, at_once: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each chunk."""
    for first in range(0, tokens, at_once):
        yield first, min(at_once, tokens - first)


def _tiles_of(params: IndexerLossParams) -> dict[str, tuple[AttentionConfig, StepConfig]]:
    h_q, head_dim = params.q.shape[1:]
    h_i, index_dim = params.index_q.shape[1:]
    return _tiles(gpu_class(params.q.device), h_q, head_dim, h_i, index_dim, params.indices is not None)


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
