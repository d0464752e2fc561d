"""The launcher: processes tokens in chunks whose slots fit in the scratch."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from flashlatte.kernels.triton.config import AttentionConfig, StepConfig, choose, tile_widths
from flashlatte.kernels.triton.key_sums import KeySums, pieces
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.ops.indexer_loss.portable.config import ATTENTION, INDEX_KEYS, INDEX_QUERIES
from flashlatte.ops.indexer_loss.portable.gradient_kernels import (
    index_queries_kernel,
    range_keys_kernel,
    selected_keys_kernel,
)
from flashlatte.ops.indexer_loss.portable.loss_kernels import logits_kernel, loss_kernel, lse_kernel, target_kernel
from flashlatte.ops.indexer_loss.reference import IndexerLossParams, IndexerLossResults
from flashlatte.ops.indexer_loss.seen_keys import AttentionRows, IndexerRows, SlotRanges
from flashlatte.runtime.process_groups import sum_over_ranks
from flashlatte.runtime.strides import first_stride, row_align

# Maximum bytes of the target, and of the index logits.
SCRATCH_BYTES = 16 * 2**20
# Maximum bytes of contributions to the gradient of index_k in scratch, if their sum is deterministic.
CONTRIBUTION_BYTES = 256 * 2**20
# Tokens whose contributions to the gradient of a tile of index keys one program sums.
_GROUP = 128
# Slots for which one program sums probabilities or index scores of all heads, a multiple of every block_n.
_SPLIT = 2048
_LOSS_BLOCK = 1024


def loss_and_gradients(params: IndexerLossParams, results: IndexerLossResults) -> None:
    IndexerLossLaunches(params, results).run()


class IndexerLossLaunches:
    """The launches of a call, and its scratch. The Hopper implementation replaces some of them."""

    def __init__(self, params: IndexerLossParams, results: IndexerLossResults) -> None:
        self.params, self.results = params, results
        indices, device = params.indices, params.q.device
        s_q, h_q, head_dim = params.q.shape
        h_i, index_dim = params.index_q.shape[1:]
        s_kv = params.kv.shape[0]
        width = s_kv if indices is None else indices.shape[2]
        indices_stride = first_stride(indices)
        self._tiles = _tiles(gpu_class(device), h_q, head_dim, h_i, index_dim, indices is not None)
        self.slots = SlotRanges(_slot_ranges(params, width), indices, indices_stride, s_q, s_kv, width)
        self._attention, self.indexer = _attention_rows(params), _indexer_rows(params)
        self.lse = self._compute_lse() if params.lse is None else params.lse
        self.losses = torch.empty(s_q, dtype=torch.float32, device=device)
        self.sees_keys = torch.empty(s_q, dtype=torch.int8, device=device)
        self.tokens_at_once = min(max(SCRATCH_BYTES // (4 * width), 1), s_q)
        self.target = torch.empty(self.tokens_at_once, width, dtype=torch.float32, device=device)
        self.logits = torch.empty_like(self.target)
        # Allocated once: while a call is recorded, no memory is reused within it.
        self._key_scratch: torch.Tensor | None = None
        if params.with_gradient:
            d_index_k = results.d_index_k.zero_()
            if indices is None:
                self._key_scratch = d_index_k.new_empty(-(-self.tokens_at_once // _GROUP), *d_index_k.shape)
            elif params.deterministic:
                rows = min(CONTRIBUTION_BYTES // (4 * index_dim), self.tokens_at_once * width)
                self._key_scratch = d_index_k.new_empty(rows, index_dim)

    def run(self) -> None:
        for first_token, tokens in _chunks(self.params.q.shape[0], self.tokens_at_once):
            self.sum_probabilities(first_token, tokens)
            if self.params.group is not None:
                # Masked slots are uninitialized on every rank; kernels do not read them.
                sum_over_ranks(self.target[:tokens], self.params.group)
            self.compute_loss(first_token, tokens)
            if self.params.with_gradient:
                self.add_gradients(first_token, tokens)
        torch.sum(self.losses, dim=0, out=self.results.loss)
        torch.sum(self.sees_keys, dim=0, out=self.results.num_rows)

    def _compute_lse(self) -> torch.Tensor:
        s_q, h_q = self.params.q.shape[:2]
        lse = torch.empty(s_q, h_q, dtype=torch.float32, device=self.params.q.device)
        tile, step = self._tiles["attention"]
        grid = (s_q * -(-h_q // tile.block_h),)
        lse_kernel[grid](self.slots, self._attention, lse=lse, STEP=step, num_warps=tile.num_warps)
        return lse

    def sum_probabilities(self, first_token: int, tokens: int) -> None:
        """Write ``target`` for these tokens."""
        tile, step = self._tiles["attention"]
        target_kernel[(tokens * -(-self.slots.width // _SPLIT),)](
            self.slots,
            self._attention,
            first_token=first_token,
            lse=self.lse,
            lse_stride_token=self.lse.stride(0),
            lse_stride_head=self.lse.stride(1),
            target=self.target,
            SPLIT=_SPLIT,
            STEP=step,
            num_warps=tile.num_warps,
        )

    def compute_loss(self, first_token: int, tokens: int) -> None:
        """Write the losses of these tokens; with gradients, overwrite ``logits`` with their gradients."""
        tile, step = self._tiles["index_queries"]
        logits_kernel[(tokens * -(-self.slots.width // _SPLIT),)](
            self.slots,
            self.indexer,
            first_token=first_token,
            logits=self.logits,
            SPLIT=_SPLIT,
            STEP=step,
            num_warps=tile.num_warps,
        )
        loss_kernel[(tokens,)](
            self.slots,
            target=self.target,
            logits=self.logits,
            first_token=first_token,
            losses=self.losses,
            sees_keys=self.sees_keys,
            WITH_GRADIENT=self.params.with_gradient,
            BLOCK=_LOSS_BLOCK,
            num_warps=4,
        )

    def add_gradients(self, first_token: int, tokens: int) -> None:
        """Write the gradients of index_q and index_weights for these tokens, and add to that of index_k."""
        tile, step = self._tiles["index_queries"]
        index_queries_kernel[(tokens * -(-self.indexer.h_i // tile.block_h),)](
            self.slots,
            self.indexer,
            first_token=first_token,
            d_logits=self.logits,
            sees_keys=self.sees_keys,
            d_index_q=self.results.d_index_q,
            d_index_weights=self.results.d_index_weights,
            STEP=step,
            num_warps=tile.num_warps,
        )
        if self.params.indices is None:
            self._add_gradient_of_ranges(first_token, tokens)
        else:
            self._add_gradient_of_selection(self.params.indices, first_token, tokens)

    def _add_gradient_of_ranges(self, first_token: int, tokens: int) -> None:
        assert self._key_scratch is not None
        tile, step = self._tiles["index_keys"]
        groups = -(-tokens // _GROUP)
        by_group = self._key_scratch[:groups]
        range_keys_kernel[(groups * -(-self.slots.s_kv // tile.block_n),)](
            self.slots,
            self.indexer,
            first_token=first_token,
            tokens=tokens,
            d_logits=self.logits,
            d_index_k=by_group,
            GROUP=_GROUP,
            STEP=step,
            num_warps=tile.num_warps,
        )
        d_index_k = self.results.d_index_k
        for group in by_group:
            d_index_k += group

    def _add_gradient_of_selection(self, indices: torch.Tensor, first_token: int, tokens: int) -> None:
        tile, step = self._tiles["index_keys"]
        # Scratch for a deterministic sum, or None.
        contributions, d_index_k = self._key_scratch, self.results.d_index_k
        topk_length = self.params.topk_length
        scratch_rows = None if contributions is None else contributions.shape[0]
        launched = slice(first_token, first_token + tokens)
        key_sums = KeySums(indices[launched], None if topk_length is None else topk_length[launched], d_index_k)
        for first_row, rows, first_slot, num_slots in pieces(tokens, indices.shape[2], tile.block_n, scratch_rows):
            selected_keys_kernel[(rows * -(-num_slots // tile.block_n),)](
                self.slots,
                self.indexer,
                first_token=first_token,
                d_logits=self.logits,
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
    """``SlotRanges.ranges``, clamped to 0 and ``width``."""
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


@functools.lru_cache(maxsize=64)
def _tiles(
    gpu: str, h_q: int, head_dim: int, h_i: int, index_dim: int, selected: bool
) -> dict[str, tuple[AttentionConfig, StepConfig]]:
    """The configuration and constants of each kernel. A row of q is loaded as two tiles, a row of index_q as one."""
    first, second = tile_widths(head_dim)
    latent_dim = first if second else head_dim
    found = {
        "attention": choose(ATTENTION, gpu, h_q, head_dim, latent_dim, in_place=True),
        "index_keys": choose(INDEX_KEYS, gpu, h_i, index_dim, index_dim, in_place=True),
        "index_queries": choose(INDEX_QUERIES, gpu, h_i, index_dim, index_dim, in_place=True),
    }
    if not selected:
        # One stage of a loop over keys is for their indices.
        for name in ("attention", "index_queries"):
            tile, step = found[name]
            found[name] = tile, step._replace(num_stages=min(step.num_stages, 2))
    return found
