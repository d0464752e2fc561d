"""Arguments of operations on packed requests of variable length: boundaries and windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.runtime import checks, value_checks

# An unbounded side of a window, for implementations.
UNLIMITED = 2**31 - 1


def check_boundaries(name: str, cu_seqlens: torch.Tensor, total: int) -> None:
    """Check that boundaries on the CPU do not decrease and do not exceed ``total``.

    Values on a device are read only with FLASHLATTE_CHECK=1, since reading them synchronizes; kernels are safe on any.
    """
    if not checks.has_values(cu_seqlens) and not value_checks.readable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values != sorted(values):
        raise ValueError(f"{name} must not decrease, got {values}")
    if values[0] < 0 or values[-1] > total:
        raise ValueError(f"{name} must be between 0 and {total}, the number of tokens, got {values}")


def boundaries_of(cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Boundaries clamped to 0 … ``total`` and made non-decreasing, as kernels do; for references."""
    return cu_seqlens.clamp(0, total).cummax(0).values.tolist()


def window_sides(window: int | Sequence[int] | None, causal: bool) -> tuple[int, int]:
    """(left, right): a query at position p attends to keys p - left to p + right.

    ``window`` is an int w (the query's position and the w - 1 before it), a pair with -1 for unbounded, or None.
    ``causal`` limits right to 0.
    """
    sides = list(window) if isinstance(window, Sequence) else [-1 if window is None else window] * 2
    if len(sides) != 2 or not all(map(checks.is_integer, sides)):
        raise TypeError(f"window must be an int, a pair of ints or None, got {window!r}")
    if checks.is_integer(window):
        if window < 1:
            raise ValueError(f"window must be at least 1, or a pair, got {window}")
        sides = [window - 1, 0]
    if min(sides) < -1:
        raise ValueError(f"window must hold lengths of at least 0, or -1 for unbounded, got {window!r}")
    left, right = (UNLIMITED if side == -1 else min(side, UNLIMITED) for side in sides)
    return left, min(right, 0) if causal else right
