"""Sequences that are packed in the rows of a call without an attention mask."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.layers.training import TrainingBatch
from flashlatte.runtime import checks

# The boundaries of sequences, as transformers' collators pass them for FlashAttention.
_QUERIES, _KEYS = "cu_seq_lens_q", "cu_seq_lens_k"


def refusal(call: dict[str, Any], requests: int, length: int) -> str | None:
    """Why the sequences of a call with tokens [b, s] are not those of its position_ids or cu_seq_lens_q; None if they
    are. Synchronises with the device if there are boundaries."""
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


def batch(call: dict[str, Any], requests: int, length: int, device: torch.device) -> TrainingBatch:
    """The sequences of a call with tokens [b, s] and no mask that ``refusal`` accepts.

    They are those of cu_seq_lens_q. Without it, a row's sequence ends where its position_ids do not go on by 1, as
    transformers' masks without a cache have it, or with the row.
    """
    tokens = requests * length
    boundaries, positions = call.get(_QUERIES), call.get("position_ids")
    if boundaries is None and positions is None:
        rows = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        return TrainingBatch.packed(rows, length, tokens)
    if boundaries is None:
        assert positions is not None
        begins = positions.diff(dim=1, prepend=positions[:, :1]) != 1
        begins[:, 0] = True
        starts = begins.expand(requests, -1).flatten().nonzero().flatten()
        boundaries = torch.nn.functional.pad(starts, (0, 1), value=tokens)
    boundaries = boundaries.to(device)
    return TrainingBatch.packed(boundaries, int(boundaries.diff().max()), tokens)
