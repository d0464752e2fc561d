"""Slices of leading rows: vLLM passes padded tensors with a separate row count."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def first_rows(name: str, x: object, count_name: str, count: object) -> torch.Tensor:
    """The first ``count`` rows of ``x``. A one-element integer tensor is accepted as a count, and read to the host.

    Raises:
        TypeError, ValueError: a wrong type, or fewer than ``count`` rows.
    """
    if (
        isinstance(count, torch.Tensor)
        and checks.given(count_name, count).numel() == 1
        and count.dtype in checks.INDEX_DTYPES
    ):
        count = int(count)
    count = checks.positive_int(count_name, count, or_zero=True)
    x = checks.given(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name} must be a tensor of rows, got a scalar")
    if x.shape[0] < count:
        raise ValueError(f"{name} must have the {count} rows of {count_name}, got {x.shape[0]}")
    return x[:count]


def request_rows(block_table: object, cu_seq_lens: object) -> torch.Tensor:
    """The rows of ``block_table`` for the b requests of ``cu_seq_lens`` [b + 1]. A padded batch has more rows.

    Without this slice, FlashLatte's operations would read b + 1 boundaries for b + 1 rows as open-ended: the last
    request would extend to the end of the output.
    """
    boundaries = checks.indices("cu_seq_lens", cu_seq_lens, ("b + 1",))
    return first_rows("block_table", block_table, "cu_seq_lens", boundaries.shape[0] - 1)
