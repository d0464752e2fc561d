"""Queries of absorbed MLA in two tensors: ``q`` has the first columns, ``q_rope`` the others or None."""

from __future__ import annotations

import torch


def width(q: torch.Tensor, q_rope: torch.Tensor | None) -> int:
    return q.shape[-1] + (0 if q_rope is None else q_rope.shape[-1])


def join(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """All columns in one tensor, for an implementation that does not read them from two."""
    return q if q_rope is None else torch.cat((q, q_rope), dim=-1)


def owners(q_rope: torch.Tensor | None) -> str:
    """Whose elements an error message counts."""
    return "q's" if q_rope is None else "q's and q_rope's"


def last_dimension(q: torch.Tensor, q_rope: torch.Tensor | None) -> str:
    """The width in words, for an error message."""
    if q_rope is None:
        return f"q's last dimension {q.shape[-1]}"
    return f"the sum {width(q, q_rope)} of q's and q_rope's last dimensions"
