"""Samples tokens from processed logits, on the device: greedy, or with each request's temperature, filters and seed.

Noise is a function of the request's seed and the token's position, not of a generator's state. A request therefore gets
the same tokens in any batch, and a draft token is verified with the draw of its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.runtime.transfer import to_device

# Temperatures are clamped from below, because float32 cannot divide by smaller ones. The order of tokens is unaffected.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# Returned instead of a token id if a row of logits has no maximum.
NO_TOKEN = -1


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """A token for each row: int64 [rows]; ``NO_TOKEN`` where a logit is NaN or all are -inf.

    Args:
        logits: float32 [rows, vocabulary], as ``process_logits`` returns them.
        params: sampling parameters of each row.
        positions: position in its request of the token that each row chooses.
    """
    largest, tokens = logits.max(-1)
    if any(one.temperature > 0 for one in params):
        temperature = _column([one.temperature or 1.0 for one in params], logits)
        temperature = temperature.clamp(_MIN_TEMPERATURE, _MAX_TEMPERATURE)
        drawn = _filtered((logits - largest[:, None]) / temperature, params)
        seeds, offsets = to_device([[one.seed or 0 for one in params], list(positions)], logits.device)
        drawn = (drawn + _gumbel(seeds, offsets, logits.shape[-1])).argmax(-1)
        greedy = to_device([one.temperature == 0 for one in params], logits.device, torch.bool)
        tokens = torch.where(greedy, tokens, drawn)
    # The maximum of a row with a NaN is NaN, which compares false.
    return torch.where(largest > -math.inf, tokens, NO_TOKEN)


def _filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits, -inf where top_k, top_p or min_p exclude a token. The most likely token always stays."""
    if any(one.min_p > 0 for one in params):
        minimum = logits.amax(-1, keepdim=True) + _column([one.min_p for one in params], logits).log()
        logits = logits.masked_fill(logits < minimum, -math.inf)
    if not any(one.top_k > 0 or one.top_p < 1 for one in params):
        return logits
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[-1]
    rank = torch.arange(vocabulary, device=logits.device)
    kept = rank < _column([float(one.top_k if one.top_k > 0 else vocabulary) for one in params], logits)
    probability = ordered.masked_fill(~kept, -math.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    # A rounded sum may exceed 1 before the last token. Without top_p, rows keep all tokens, whatever other rows have.
    kept &= (before < _column([one.top_p if one.top_p < 1 else math.inf for one in params], logits)) | (rank == 0)
    return torch.full_like(logits, -math.inf).scatter(-1, tokens, ordered.masked_fill(~kept, -math.inf))


def _gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Noise -log(-log(1 - v)), float32 [rows, vocabulary], v in (0, 1) by hashing seed, position and token."""
    row = _mixed(_mixed(seeds) + positions)
    bits = _mixed(row[:, None] + torch.arange(vocabulary, device=seeds.device))
    # The largest noise decides, so float32's precision is near v = 0. A sum that is rounded to v = 1, or v = 0, would
    # make the noise infinite: an infinite one would choose its token whatever the logits are, also an excluded one.
    uniform = _shifted(bits, 24).to(torch.float32).add_(0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 (Steele et al., 2014) on int64, in which PyTorch's arithmetic wraps."""
    x = x + -0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits of the unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like.device, torch.float32)[:, None]
