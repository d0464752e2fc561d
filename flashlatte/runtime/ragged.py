"""Arguments of operations over requests of variable length, packed one after the other: boundaries and windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.runtime import checks, value_checks

# A window's side without a bound, for implementations.
UNLIMITED = 2**31 - 1


def check_boundaries(name: str, cu_seqlens: torch.Tensor, total: int) -> None:
    """Refuse boundaries on the CPU that decrease or go beyond ``total``.

    Values on a device are for the kernels to check: reading them would wait for it. FLASHLATTE_CHECK=1 reads them.
    """
    if not checks.has_values(cu_seqlens) and not value_checks.readable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values != sorted(values):
        raise ValueError(f"{name} must not decrease, got {values}")
    if values[0] < 0 or values[-1] > total:
        raise ValueError(f"{name} must lie between 0 and the {total} tokens there are, got {values}")


def boundaries_of(cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """The boundaries between 0 and ``total``, none before an earlier one, for references: as kernels read them."""
    return cu_seqlens.clamp(0, total).cummax(0).values.tolist()


def window_sides(window: int | Sequence[int] | None, causal: bool) -> tuple[int, int]:
    """(left, right): a query at position p sees keys p - left to p + right.

    ``window`` is an int w (its position and the w - 1 before it), a pair with -1 for no bound, or None. ``causal`` caps
    right at 0.
    """
    sides = list(window) if isinstance(window, Sequence) else [-1 if window is None else window] * 2
    if len(sides) != 2 or not all(map(checks.is_integer, sides)):
        raise TypeError(f"window must be an int, a pair of ints or None, got {window!r}")
    if checks.is_integer(window):
        if window < 1:
            raise ValueError(f"window must be at least 1, or a pair, got {window}")
        sides = [window - 1, 0]
    if min(sides) < -1:
        raise ValueError(f"window must hold lengths from 0, or -1 for no bound, got {window!r}")
    left, right = (UNLIMITED if side == -1 else min(side, UNLIMITED) for side in sides)
    return left, min(right, 0) if causal else right
