"""Interpretation of ``attention_mask`` and ``position_ids`` for a pass over a ``V4Store``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlatte.layers.v4 import V4Step
from flashlatte.runtime import checks

# Positions are multiplied by frequencies in float32, which represents integers exactly up to 2^24.
MAX_POSITIONS = 2**24


@dataclass(frozen=True)
class PassMask:
    """The columns that are visible to windows, and the range of positions. A column is a position in the padded batch.

    Attributes:
        max_length: upper bound of positions, exclusive.
        ahead: whether a position exceeds its column; stock attention then attends to groups that end after the token.
        first_tokens: int64 [b], the first visible column, if all hidden columns are on the left; else None.
        visible: bool [b, columns], the visible columns, if hidden columns are not only on the left; else None.
    """

    max_length: int
    ahead: bool = False
    first_tokens: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    @classmethod
    def read(
        cls,
        requests: int,
        columns: int,
        queries: int,
        device: torch.device,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> PassMask:
        """The mask of ``queries`` new columns after ``columns`` of history; synchronizes at most once.

        Args:
            attention_mask: [b, columns + queries], 0 where a column is hidden; None if none is.
            position_ids: int [b or 1, queries]; None if they are the columns.

        Raises:
            TypeError, ValueError: an argument of another type, shape or device, or a position below 0 or not below
                ``MAX_POSITIONS``.
        """
        total = columns + queries
        facts, visible = [], None
        if attention_mask is not None:
            if attention_mask.shape != (requests, total):
                raise ValueError(
                    f"attention_mask must be [{requests}, {total}], one value for each token, past and new, got "
                    f"{list(attention_mask.shape)}"
                )
            visible = attention_mask.to(device) != 0
            facts += [visible.all(), (visible[:, 1:] >= visible[:, :-1]).all()]
        if position_ids is not None:
            rows = 1 if isinstance(position_ids, torch.Tensor) and position_ids.shape[:1] == (1,) else requests
            dtypes = checks.INDEX_DTYPES
            checks.tensor("position_ids", position_ids, (rows, queries), dtypes, device, unit_last_stride=False)
            beyond = position_ids - torch.arange(columns, total, device=device)
            facts += [position_ids.min(), position_ids.max(), beyond.max()]
        if not facts:
            return cls(total)
        known = torch.stack([fact.to(torch.int64) for fact in facts]).tolist()
        max_length, ahead, first_tokens = total, False, None
        if position_ids is not None:
            smallest, largest, distance = known[-3:]
            if smallest < 0 or largest >= MAX_POSITIONS:
                wrong = smallest if smallest < 0 else largest
                raise ValueError(f"position_ids must be at least 0 and below {MAX_POSITIONS}, got {wrong}")
            max_length, ahead = max(total, largest + 1), distance > 0
        if visible is not None:
            every_column, left_only = known[:2]
            if every_column:
                visible = None
            elif left_only:
                first_tokens, visible = (~visible).sum(dim=1), None
        return cls(max_length, ahead, first_tokens, visible)

    def hide(self, step: V4Step) -> torch.Tensor:
        """The step's window slots [T, window], with -1 for hidden columns."""
        if self.visible is None:
            return step.window_slots
        first = (step.positions - step.window + 1).clamp_min(0)
        columns = first.unsqueeze(1) + torch.arange(step.window, device=first.device)
        columns = columns.clamp_max(self.visible.shape[1] - 1)
        return step.window_slots.where(self.visible[step.request_ids.unsqueeze(1), columns], -1)
