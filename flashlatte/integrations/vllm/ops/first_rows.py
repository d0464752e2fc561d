"""The first rows of a tensor, which vLLM asks for by a number beside it."""

from __future__ import annotations

import torch

from flashlatte.runtime import checks


def first_rows(name: str, x: object, count_name: str, count: object) -> torch.Tensor:
    """The first ``count`` rows of a tensor that has as many; a tensor of one integer is a count too, and is read."""
    if isinstance(count, torch.Tensor) and count.numel() == 1 and count.dtype in checks.INDEX_DTYPES:
        count = int(count)
    count = checks.positive_int(count_name, count, or_zero=True)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or x.layout != torch.strided:
        raise ValueError(f"{name} must be a strided tensor of rows, got shape {list(x.shape)}, layout {x.layout}")
    if x.shape[0] < count:
        raise ValueError(f"{name} must have the {count} rows that {count_name} says, got {x.shape[0]}")
    return x[:count]


def request_rows(block_table: object, cu_seq_lens: object) -> torch.Tensor:
    """block_table's rows of the requests that ``cu_seq_lens`` [b + 1] has; others may follow, as in a padded batch.

    Operations of this library take [b] for boundaries without an end, where the last request goes on to the end of what
    is written: vLLM's do not.
    """
    boundaries = checks.tensor("cu_seq_lens", cu_seq_lens, ("b + 1",), checks.INDEX_DTYPES, unit_last_stride=False)
    return first_rows("block_table", block_table, "cu_seq_lens", boundaries.shape[0] - 1)
