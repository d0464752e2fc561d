"""Sampling of tokens from logits as the engine's runner does, for rows of different requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashlatte.engine import SamplingParams
from flashlatte.engine.logits_processing import LogitsRow, TokenHistory, process_logits
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import sample


def choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
) -> torch.Tensor:
    """Sampled tokens, int64 [rows], for requests that all have this prompt and output.

    Args:
        positions: position of each row's token, as used for seeds; the length of prompt and output if None.
    """
    rows = []
    for number, one in enumerate(params):
        request = Request("a", list(prompt), 100, sampling=one, state_index=number, pending=1)
        request.tokens += output
        rows.append(LogitsRow(request, len(request.tokens) if positions is None else positions[number]))
    history = None
    if any(one.uses_penalties for one in params):
        history = TokenHistory(len(params), logits.shape[-1], logits.device)
    return sample(process_logits(logits, rows, None, history), params, [row.position for row in rows])
