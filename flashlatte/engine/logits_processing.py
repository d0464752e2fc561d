"""Applies constraints, biases and penalties to a model's logits, on the device.

The order is vLLM's: tokens are excluded, then biases are added, then penalties are applied. The host does not wait for
the device: an output token of a step in flight is read on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashlatte.engine.request import Request
from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.runtime.transfer import to_device

# Penalties are clamped, so that no logit becomes infinite or NaN. Stronger penalties would not change the order of
# tokens.
_MAX_PENALTY = 2.0**64
# The token before an excluded one is already checked.
_UNCONDITIONAL = -1


@dataclass(frozen=True)
class LogitsRow:
    """A row of logits, from which the token at ``position`` of a request is chosen.

    Attributes:
        num_drafts: draft tokens of the request before the position.
    """

    request: Request
    position: int
    num_drafts: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_generated(self) -> int:
        """Output tokens before the position."""
        return self.position - len(self.request.prompt)

    def known_output(self) -> list[int]:
        """Output tokens before the position that the host has received."""
        return [*self.request.tokens[len(self.request.prompt) :], *self.request.draft_tokens[: self.num_drafts]]


class TokenHistory:
    """Tokens that occurred in each request, for penalties.

    Attributes:
        in_prompt: bool [requests, vocabulary], by state index.
        output_counts: int32 [requests, vocabulary], by state index.
    """

    def __init__(self, num_requests: int, vocabulary: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.in_prompt = torch.zeros(num_requests, vocabulary, dtype=torch.bool, device=device)
            self.output_counts = torch.zeros(num_requests, vocabulary, dtype=torch.int32, device=device)

    def grow(self, num_requests: int) -> None:
        """Make room for more requests."""
        while len(self.in_prompt) < num_requests:
            self.in_prompt = torch.cat((self.in_prompt, torch.zeros_like(self.in_prompt)))
            self.output_counts = torch.cat((self.output_counts, torch.zeros_like(self.output_counts)))

    def add(self, state_indices: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a sampled token (int64 [n]) of each of ``n`` different requests."""
        self.output_counts[state_indices, tokens] += 1

    def rows(self, rows: Sequence[LogitsRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """``in_prompt`` and ``output_counts`` [rows, vocabulary] before each row's position."""
        masks, counts = [], []
        for row in rows:
            request = row.request
            in_prompt, output_counts = self.in_prompt[request.state_index], self.output_counts[request.state_index]
            if row.params.uses_penalties:
                # With two pending tokens, ``add`` has already counted the token that the host has not received.
                if request.pending == 1 and row.num_drafts == 0:
                    # index_fill_, because the assignment of a Python number would wait for the GPU.
                    in_prompt.zero_().index_fill_(0, to_device(request.prompt, in_prompt.device), True)
                    _count(output_counts.zero_(), request.tokens[len(request.prompt) :])
                if row.num_drafts:
                    output_counts = _count(output_counts.clone(), request.draft_tokens[: row.num_drafts])
            masks.append(in_prompt)
            counts.append(output_counts)
        return torch.stack(masks), torch.stack(counts)


def process_logits(
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    last_tokens: torch.Tensor | None = None,
    history: TokenHistory | None = None,
) -> torch.Tensor:
    """Apply all sampling parameters of the rows' requests except those of the draw; returns float32 [rows, vocabulary].

    Args:
        logits: float [rows, vocabulary].
        last_tokens: int64, the last sampled token by state index; needed for bad words with a step in flight.
        history: needed for penalties.
    """
    logits = logits.float()
    excluded = _excluded(logits, rows, last_tokens)
    if excluded is not None:
        logits = logits.masked_fill(excluded, -math.inf)
    biases = [
        (number, token, bias)
        for number, row in enumerate(rows)
        for token, bias in (row.params.logit_bias or {}).items()
    ]
    if biases:
        numbers, tokens = to_device([one[:2] for one in biases], logits.device).unbind(1)
        values = to_device([bias for *_, bias in biases], logits.device, torch.float32)
        logits = logits.index_put((numbers, tokens), values, accumulate=True)
    if history is not None and any(row.params.uses_penalties for row in rows):
        logits = penalize(logits, [row.params for row in rows], *history.rows(rows))
    return logits


def penalize(
    logits: torch.Tensor, params: Sequence[SamplingParams], in_prompt: torch.Tensor, output_counts: torch.Tensor
) -> torch.Tensor:
    """Apply repetition, frequency and presence penalties to float32 logits [rows, vocabulary]."""

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, logits.device, torch.float32)[:, None]

    repetition = column([one.repetition_penalty for one in params]).clamp(1 / _MAX_PENALTY, _MAX_PENALTY)
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | in_output, repeated, logits)
    logits = logits - column([one.frequency_penalty for one in params]) * output_counts
    return logits - column([one.presence_penalty for one in params]) * in_output


def _count(counts: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Add 1 to the counts of tokens, in place."""
    indices = to_device(tokens, counts.device)
    return counts.scatter_add_(0, indices, torch.ones_like(indices, dtype=counts.dtype))


def _excluded(logits: torch.Tensor, rows: Sequence[LogitsRow], last_tokens: torch.Tensor | None) -> torch.Tensor | None:
    """bool [rows, vocabulary], the tokens that cannot be chosen; None if all can."""
    restricted = [number for number, row in enumerate(rows) if row.params.allowed_token_ids is not None]
    entries = [(number, *entry) for number, row in enumerate(rows) for entry in _exclusions(row)]
    if not restricted and not entries:
        return None
    excluded = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    if restricted:
        excluded.index_fill_(0, to_device(restricted, logits.device), 1)
        pairs = [(number, token) for number in restricted for token in rows[number].params.allowed_token_ids or ()]
        numbers, tokens = to_device(pairs, logits.device).unbind(1)
        excluded.index_put_((numbers, tokens), excluded.new_zeros(()))
    if entries:
        numbers, tokens, required = to_device(entries, logits.device).unbind(1)
        applies = required == _UNCONDITIONAL
        if last_tokens is not None:
            indices = to_device([row.request.state_index for row in rows], logits.device)
            applies |= last_tokens[indices][numbers] == required
        excluded.index_put_((numbers, tokens), applies.to(torch.int32), accumulate=True)
    return excluded > 0


def _exclusions(row: LogitsRow) -> Iterator[tuple[int, int]]:
    """(token, condition) of a row's excluded tokens: the exclusion applies if the last output token equals the
    condition, or always if it is ``_UNCONDITIONAL``."""
    params = row.params
    for token in params.suppress_tokens or ():
        yield token, _UNCONDITIONAL
    if row.num_generated < params.min_tokens:
        for token in params.all_stop_token_ids:
            yield token, _UNCONDITIONAL
    if not params._bad_words_token_ids:
        return
    known = row.known_output()
    # The engine has at most one step in flight, so the host lacks at most the last token.
    pending = row.num_generated - len(known)
    for *prefix, token in params._bad_words_token_ids:
        if len(prefix) > row.num_generated:
            continue
        to_match = prefix[: len(prefix) - pending]
        if to_match == known[len(known) - len(to_match) :]:
            yield token, prefix[-1] if pending and prefix else _UNCONDITIONAL
