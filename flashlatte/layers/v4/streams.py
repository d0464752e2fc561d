"""The streams of hidden states that DeepSeek-V4's layers share, with the parameters of transformers' modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flashlatte.ops.index_weights import MOST_ROWS, index_weights
from flashlatte.ops.mhc import mhc_pre


def read_streams(
    module: Any, streams: torch.Tensor, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mhc_pre`` of streams [T, n, hidden_size] by a ``DeepseekV4HyperConnection``: three launches where that takes
    140."""
    rows, weight = streams.flatten(1), module.fn.float()
    if rows.shape[0] <= MOST_ROWS:
        projected = index_weights(rows, weight, backend=backend)
    else:
        projected = functional.linear(rows.float(), weight)
    return mhc_pre(
        streams,
        projected,
        module.base.float(),
        module.scale.float(),
        rms_eps=module.input_norm.eps,
        eps=module.hc_eps,
        iterations=module.hc_sinkhorn_iters,
        backend=backend,
    )
