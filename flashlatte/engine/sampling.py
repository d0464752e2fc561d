"""From logits to tokens, on the device: greedy, or drawn with a request's own temperature, filters and seed.

Noise is a function of the request's seed and the token's position, not of a generator's state: a request gets the same
tokens whatever else is in the batch, and a guess that is verified later is verified by the same draw.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.runtime import checks
from flashlatte.runtime.transfer import to_device

# Temperatures that float32 cannot divide by are the nearest that it can, and so far a penalty moves a logit at most:
# the order of tokens is the same beyond, and no logit becomes infinite or NaN.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_STRONGEST_PENALTY = 2.0**64
# In the place of a token id, where a row of logits has no largest number.
NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Attributes:
        max_new_tokens: at most so many, from 1.
        temperature: 0 takes the likeliest token; above, logits are divided by it.
        top_k: draw from the so many likeliest tokens; 0: all.
        top_p: draw from the likeliest tokens that together have this probability, above 0 and up to 1.
        min_p: draw from tokens at least so likely, relative to the likeliest one; 0 to 1.
        repetition_penalty: logits of tokens that occurred are divided by it if positive, multiplied if negative.
        seed: of the draw, 0 to 2^63 - 1; None: the number of requests that the engine took before, so that no two draw
            alike, and all draw the same when a program runs again.
        suppress_tokens: are never chosen.
        stop_tokens: end the request, and are part of what it returns.
        ignore_eos: whether it goes on after tokens that end a text, by the model's generation config; else those are
            stop_tokens too.
        stop: a text, or several, that end the request (an engine with a tokenizer); their tokens are part of what it
            returns.
        logprobs: whether to return each token's log-probability before temperature and filters.

    Raises:
        TypeError, ValueError: a value of a wrong type or out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: str | tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        checks.positive_int("max_new_tokens", self.max_new_tokens)
        checks.positive_int("top_k", self.top_k, or_zero=True)
        checks.flag("ignore_eos", self.ignore_eos)
        checks.flag("logprobs", self.logprobs)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            checks.number(name, getattr(self, name))
        seed = 0 if self.seed is None else self.seed
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "a finite number from 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            "seed": (checks.positive_int("seed", seed, or_zero=True) < 2**63, "from 0 to 2^63 - 1"),
        }
        for name, (fits, accepted) in ranges.items():
            if not fits:
                raise ValueError(f"{name} must be {accepted}, got {getattr(self, name)}")
        # What is given may be read once only.
        for name in ("suppress_tokens", "stop_tokens"):
            object.__setattr__(self, name, tuple(token_ids(name, getattr(self, name))))
        if not isinstance(self.stop, Iterable):
            raise TypeError(f"stop must be a text or hold texts, got {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop must hold texts, got {stop!r}")
        if "" in stop:
            raise ValueError(f"stop must hold texts that are not empty, got {stop!r}")
        object.__setattr__(self, "stop", stop)


def token_ids(name: str, values: Iterable[Any]) -> list[int]:
    """The ints of a list, a tuple or a 1-D tensor of tokens.

    Raises:
        TypeError: something that is no int, or a text.
    """
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}")
    tokens = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must hold ints, got {value!r}")
        tokens.append(operator.index(value))
    return tokens


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token for each row: int64 [rows], ``NO_TOKEN`` where logits are NaN, or -inf throughout.

    Args:
        logits: float [rows, vocabulary].
        params: of each row.
        positions: of the token that each row chooses, in its request.
        seen: bool [rows, vocabulary], which tokens occurred; needed where a repetition_penalty is not 1.
    """
    logits = logits.float()
    if seen is not None and any(one.repetition_penalty != 1 for one in params):
        penalty = _column([one.repetition_penalty for one in params], logits)
        penalty = penalty.clamp(1 / _STRONGEST_PENALTY, _STRONGEST_PENALTY)
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = _suppressed(logits, params)
    largest, tokens = logits.max(-1)
    if any(one.temperature > 0 for one in params):
        temperature = _column([one.temperature or 1.0 for one in params], logits).clamp(_SMALLEST, _LARGEST)
        drawn = _filtered((logits - largest[:, None]) / temperature, params)
        seeds, places = to_device([[one.seed or 0 for one in params], list(positions)], logits.device)
        drawn = (drawn + _gumbel(seeds, places, logits.shape[-1])).argmax(-1)
        greedy = to_device([one.temperature == 0 for one in params], logits.device, torch.bool)
        tokens = torch.where(greedy, tokens, drawn)
    # The maximum of a row with a NaN is NaN, which compares false.
    return torch.where(largest > -math.inf, tokens, NO_TOKEN)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Natural log-probability of each row's token: float32 [rows]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def _suppressed(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits, -inf where a row suppresses a token."""
    places = [(row, token) for row, one in enumerate(params) for token in one.suppress_tokens]
    if not places:
        return logits
    rows, tokens = to_device(places, logits.device).unbind(1)
    return logits.index_put((rows, tokens), logits.new_full((), -math.inf))


def _filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits, -inf where top_k, top_p or min_p leave a token out. The likeliest token always stays."""
    if any(one.min_p > 0 for one in params):
        least = logits.amax(-1, keepdim=True) + _column([one.min_p for one in params], logits).log()
        logits = logits.masked_fill(logits < least, -math.inf)
    if not any(one.top_k > 0 or one.top_p < 1 for one in params):
        return logits
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[-1]
    rank = torch.arange(vocabulary, device=logits.device)
    kept = rank < _column([float(one.top_k or vocabulary) for one in params], logits)
    probability = ordered.masked_fill(~kept, -math.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    kept &= (before < _column([one.top_p for one in params], logits)) | (rank == 0)
    return torch.full_like(logits, -math.inf).scatter(-1, tokens, ordered.masked_fill(~kept, -math.inf))


def _gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Noise -log(-log u), float32 [rows, vocabulary], u in (0, 1) by hashing seed, position and token."""
    row = _mixed(_mixed(seeds) + positions)
    bits = _mixed(row[:, None] + torch.arange(vocabulary, device=seeds.device))
    # 24 bits, centred, so that neither 0 nor 1 comes up.
    uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-24)
    return -torch.log(-torch.log(uniform))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al., 2014) on int64, in which PyTorch's arithmetic wraps."""
    x = x + -0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits of the unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like.device, torch.float32)[:, None]
