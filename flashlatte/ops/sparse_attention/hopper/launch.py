"""The launcher: row sums, then both kernels for each piece of query tokens in turn."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.kernels.hopper.row_loads import LatentKeys
from flashlatte.kernels.triton.key_sums import KeySums, pieces
from flashlatte.kernels.triton.selections import selections_of
from flashlatte.ops.sparse_attention.hopper.keys_kernel import KeyGradientSlots, key_gradients_kernel
from flashlatte.ops.sparse_attention.hopper.queries_kernel import query_gradients_kernel
from flashlatte.ops.sparse_attention.hopper.state import (
    BOX,
    HEADS,
    KEYS,
    PARTS,
    SparseBackwardPiece,
    SparseBackwardRows,
)
from flashlatte.ops.sparse_attention.reference import SparseAttentionBackwardParams, SparseAttentionGradients
from flashlatte.ops.sparse_attention.row_sums import row_sums
from flashlatte.runtime import checks, machine
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

# Maximum bytes of P and dS in scratch; at least those of a token.
SCORE_BYTES = 256 * 2**20
# Maximum bytes of contributions to dkv in scratch, if their sum is deterministic. With head dim 576 and 2,048 selected
# keys these are the contributions of 66 tokens, whose programs fill 132 SMs.
SCRATCH_BYTES = 320 * 2**20
# Programs of a token in the keys kernel. An SM runs one program of either kernel at a time.
_KEY_PROGRAMS = 2
# Elements of a box of dS or P.
_BOX_ELEMENTS = HEADS.value * KEYS.value


def backward(params: SparseAttentionBackwardParams, gradients: SparseAttentionGradients) -> None:
    q, kv, indices, dout = params.q, params.kv, params.indices, params.dout
    s_q, h_q, head_dim = q.shape
    topk = indices.shape[2]
    if dout.data_ptr() % 16:
        dout = dout.clone()
    checks.begins_aligned(q=q, kv=kv)
    sums = row_sums(params, gradients.d_sink)

    head_blocks, key_tiles = -(-h_q // HEADS.value), -(-topk // KEYS.value)
    boxes_of_token = key_tiles * head_blocks * PARTS.value
    num_sms = machine.num_sms(q.device)
    max_tokens = max(SCORE_BYTES // (2 * boxes_of_token * _BOX_ELEMENTS), 1)
    if params.deterministic:
        max_tokens = _whole_waves(max_tokens, head_blocks, num_sms)
    tokens_at_once = min(max_tokens, s_q)
    scores = torch.empty(tokens_at_once * boxes_of_token * HEADS.value, KEYS.value, dtype=q.dtype, device=q.device)
    described_scores = describe(scores, scores.shape, (KEYS.value,), (HEADS.value, KEYS.value))
    rows = SparseBackwardRows(_describe_heads(q), _describe_heads(dout), sums, s_q * h_q, h_q)
    keys, dq = LatentKeys(kv, kv.stride(0) // 8), _describe_heads(gradients.dq)
    selections = selections_of(indices, params.topk_length, kv.shape[0])
    dkv_sum = torch.zeros(kv.shape[0], head_dim, dtype=torch.float32, device=q.device)
    key_sums, contributions = KeySums(indices, params.topk_length, dkv_sum), None
    if params.deterministic:
        scratch_rows = SCRATCH_BYTES // (4 * head_dim * KEYS.value) * KEYS.value
        if scratch_rows >= topk:
            # Pieces of equal size, whose keys are sorted together.
            equal = min(_whole_waves(scratch_rows // topk, _KEY_PROGRAMS, num_sms), tokens_at_once)
            tokens_at_once = tokens_at_once // equal * equal
            scratch_rows = equal * topk
        contributions = torch.empty(scratch_rows, head_dim, dtype=torch.float32, device=q.device)
    for begin in range(0, s_q, tokens_at_once):
        tokens = min(tokens_at_once, s_q - begin)
        piece = SparseBackwardPiece(described_scores, begin, key_tiles, head_blocks)
        query_gradients_kernel[(tokens * head_blocks,)](
            rows,
            keys,
            selections,
            piece,
            dq=dq,
            softmax_scale=params.softmax_scale,
            HAS_ROPE=head_dim == 576,
            num_warps=4,
        )
        for of_piece, count, first_slot, slots in _launches(tokens, topk, contributions):
            first_token = begin + of_piece
            target = dkv_sum if contributions is None else contributions
            key_gradients_kernel[(_KEY_PROGRAMS * count,)](
                rows,
                selections,
                piece,
                KeyGradientSlots(first_token, first_slot, slots, target, head_dim, contributions is None),
                HAS_ROPE=head_dim == 576,
                BLOCKS=head_blocks,
                num_warps=4,
            )
            if contributions is not None:
                key_sums.add(contributions, first_token, count, first_slot, slots)
    gradients.dkv.copy_(dkv_sum.unsqueeze(1))


def _whole_waves(tokens: int, programs_of_token: int, num_sms: int) -> int:
    """``tokens``, rounded down to a multiple of the tokens whose programs fill all SMs, so that the last wave of a
    launch is full; unchanged if there are fewer."""
    wave = max(num_sms // programs_of_token, 1)
    return tokens // wave * wave if tokens >= wave else tokens


def _launches(tokens: int, topk: int, contributions: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
    """(first token of the piece, tokens, first slot, slots) of the launches of the keys kernel for a piece."""
    if contributions is None:
        return [(0, tokens, 0, topk)]
    return list(pieces(tokens, topk, KEYS.value, contributions.shape[0]))


def _describe_heads(x: torch.Tensor) -> Any:
    """TMA descriptor [s_q, h_q, d] of boxes of 64 heads and 64 columns."""
    return describe(x, x.shape, strides_in_use(x), (1, HEADS.value, BOX.value))
