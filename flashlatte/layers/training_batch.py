"""The tokens of a training step: their sequences and their rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashlatte.layers import models
from flashlatte.layers.training_ranks import TrainingRanks
from flashlatte.runtime import checks, ragged


@dataclass(frozen=True)
class TrainingBatch:
    """The sequences of a flat batch of T tokens.

    Attributes:
        cu_seqlens: int32 [n + 1], boundaries of the contiguous sequences. A run of padding is a sequence too, so that
            padding attends only to itself.
        max_seqlen: tokens of the longest sequence, or more.
        key_start, key_end: int32 [T], the range of tokens that each token may select: those of its sequence up to its
            own. Empty for padding, which selects nothing and is excluded from the indexer's loss. With ``blocks``, only
            for their tokens.
        blocks: the tokens of a rank that has a part of the batch; None for all.
        has_padding: whether there is padding within the boundaries. The output of its attention is 0.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    key_start: torch.Tensor
    key_end: torch.Tensor
    blocks: Sequence[range] | None = None
    has_padding: bool = False

    @staticmethod
    def packed(cu_seqlens: torch.Tensor, max_seqlen: int, tokens: int) -> TrainingBatch:
        """Sequences without padding. Tokens outside the boundaries belong to no sequence. Boundaries are clamped to
        ``tokens`` and made non-decreasing, because rows are gathered by them."""
        cu_seqlens = cu_seqlens.clamp(0, tokens).cummax(0).values.int().contiguous()
        token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True)
        inside = (sequence > 0) & (sequence < cu_seqlens.shape[0])
        start = cu_seqlens[(sequence - 1).clamp_min(0)]
        return TrainingBatch(cu_seqlens, max_seqlen, torch.where(inside, start, 0), torch.where(inside, token + 1, 0))

    @staticmethod
    def of_ranks(cu_seqlens: torch.Tensor, max_seqlen: int, tokens: int, ranks: TrainingRanks | None) -> TrainingBatch:
        """``packed``, or the part of it with this rank's ``tokens`` tokens."""
        if ranks is None or ranks.tokens is None or ranks.blocks is None:
            return TrainingBatch.packed(cu_seqlens, max_seqlen, tokens)
        if (count := sum(map(len, ranks.blocks))) != tokens:
            raise ValueError(f"hidden must have the {count} tokens of this rank, got {tokens}")
        batch = TrainingBatch.packed(cu_seqlens, max_seqlen, ranks.tokens)
        key_start, key_end = (
            torch.cat([x[block.start : block.stop] for block in ranks.blocks]) for x in (batch.key_start, batch.key_end)
        )
        return dataclasses.replace(batch, key_start=key_start, key_end=key_end, blocks=ranks.blocks)


def check_sequences(cu_seqlens: torch.Tensor, max_seqlen: int, tokens: int, max_position: int) -> None:
    """Check the boundaries of a batch's sequences; values on a GPU are not read (``ragged.check_boundaries``)."""
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [n + 1] with n at least 1, got {list(cu_seqlens.shape)}")
    if checks.positive_int("max_seqlen", max_seqlen) > max_position:
        raise ValueError(f"max_seqlen must be at most the config's rope.max_position {max_position}, got {max_seqlen}")
    ragged.check_boundaries("cu_seqlens", cu_seqlens, tokens)
    if checks.has_values(cu_seqlens) and (longest := int(cu_seqlens.diff().max())) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the {longest} tokens of the longest sequence, got {max_seqlen}")


class Rotation(NamedTuple):
    """Cosines and sines [T, rope / 2] of a batch's tokens, and whether dims 2i and 2i + 1 form a pair."""

    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool

    @staticmethod
    def at(table: torch.Tensor, positions: torch.Tensor, layout: str) -> Rotation | None:
        """The rotation of tokens at ``positions`` by a table [max_position, rope]; None if nothing is rotated."""
        if layout == models.UNROTATED:
            return None
        cosines, sines = table[positions].chunk(2, dim=-1)
        return Rotation(cosines, sines, layout == models.INTERLEAVED)

    def detach(self) -> Rotation:
        """The same rotation without gradients of its frequencies, which are parameters in Mistral Large 4."""
        return Rotation(self.cosines.detach(), self.sines.detach(), self.interleaved)

    def __call__(self, x: torch.Tensor, interleaved: bool | None = None) -> torch.Tensor:
        """Rotate x [T, h, rope] in float32, or float64 for float64.

        In the result, the first dims of all pairs precede the second ones. Products of queries and keys do not depend
        on the order of dims.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        interleaved = self.interleaved if interleaved is None else interleaved
        first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
        cosines, sines = (values.to(wide.dtype)[:, None] for values in (self.cosines, self.sines))
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)
