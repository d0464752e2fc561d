"""Boundaries of the sequences that are packed in the rows of a call without an attention mask."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.layers.training_batch import TrainingBatch
from flashlatte.runtime import checks

# The boundaries of sequences, as transformers' collators pass them for FlashAttention.
_QUERIES, _KEYS = "cu_seq_lens_q", "cu_seq_lens_k"
_ARGUMENTS = ("position_ids", _QUERIES, _KEYS)


def rest(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call except those that separate sequences."""
    return {name: value for name, value in call.items() if name not in _ARGUMENTS}


def refusal(call: dict[str, Any], tokens: torch.Tensor) -> str | None:
    """Why the boundaries of a call (position_ids or cu_seq_lens_q) are not supported; None if they are, or not given.

    Synchronizes with the device if there are boundaries.

    Args:
        tokens: the call's tokens [b, s].
    """
    requests, length = tokens.shape[:2]
    positions, boundaries = call.get("position_ids"), call.get(_QUERIES)
    if positions is not None and (positions.dim() != 2 or positions.shape[0] not in (1, requests)):
        return f"its position_ids have shape {list(positions.shape)}"
    if boundaries is None:
        return None if call.get(_KEYS) is None else f"it has {_KEYS} without {_QUERIES}"
    if call.get("attention_mask") is not None:
        return f"it has {_QUERIES} and an attention_mask"
    if boundaries.dim() != 1 or boundaries.shape[0] < 2 or boundaries.dtype not in checks.INDEX_DTYPES:
        return f"its {_QUERIES} are not int32 or int64 [n + 1]"
    keys = call.get(_KEYS)
    if keys is not None and keys is not boundaries and not torch.equal(keys.to(boundaries), boundaries):
        return f"its {_KEYS} differ from its {_QUERIES}"
    ends = (boundaries[0] == 0) & (boundaries[-1] == requests * length)
    if not bool(ends & (boundaries.diff() >= 0).all()):
        return f"its {_QUERIES} do not lead from 0 to its {requests * length} tokens"
    return None


def positions(call: dict[str, Any], batch: TrainingBatch) -> torch.Tensor | None:
    """Positions of a ``batch``'s tokens in their sequences, int32 [T], for a call with cu_seq_lens_q and without
    position_ids; None for other calls, whose layers receive correct position_ids."""
    separate = call.get(_QUERIES) is not None and call.get("position_ids") is None
    return batch.key_end - 1 - batch.key_start if separate else None


def counts_from_zero(call: dict[str, Any], batch: TrainingBatch, requests: int) -> bool:
    """Whether a call's position_ids are 0, 1, 2, … in each sequence of its ``batch``; True for a call without them.

    ``refusal`` must have accepted the call, and the batch must have no padding. Synchronizes with the device if there
    are position_ids.
    """
    positions = call.get("position_ids")
    if positions is None:
        return True
    expected = batch.key_end - 1 - batch.key_start
    return torch.equal(positions.expand(requests, -1).flatten().to(expected), expected)


def batch(call: dict[str, Any], tokens: torch.Tensor) -> TrainingBatch | None:
    """The sequences of the tokens [b, s] of a call without a mask that ``refusal`` accepts; None for one in each row.

    cu_seq_lens_q separates the sequences if given. Otherwise a sequence ends at the end of its row, or where
    position_ids do not increase by 1, as in transformers' masks without a cache.
    """
    requests, length = tokens.shape[:2]
    count = requests * length
    boundaries, positions = call.get(_QUERIES), call.get("position_ids")
    if boundaries is None:
        if positions is None:
            return None
        begins = positions.diff(dim=1, prepend=positions[:, :1]) != 1
        begins[:, 0] = True
        starts = begins.expand(requests, -1).flatten().nonzero().flatten()
        boundaries = torch.nn.functional.pad(starts, (0, 1), value=count)
    boundaries = boundaries.to(tokens.device)
    return TrainingBatch.packed(boundaries, int(boundaries.diff().max()), count)
