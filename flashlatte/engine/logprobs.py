"""Log-probabilities of tokens: the chosen one and the most likely ones, computed on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows whose float32 log-probabilities exist at a time: with a vocabulary of 129,280 they take 132 MB.
_ROWS_AT_A_TIME = 256

# A token, its log-probability, and its rank.
RankedToken = tuple[int, float, int]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the token as text; None from an engine without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of rows of logits.

    Attributes:
        tokens: int64 [rows], the chosen tokens.
        logprobs: float32 [rows], of these tokens.
        ranks: int64 [rows], 1 + the number of tokens that are more likely.
        top_tokens, top_logprobs: [rows, k], the k most likely tokens in order.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> LogprobRows:
        """From logits [rows, vocabulary] and the chosen token of each row, int64 [rows], with the ``k`` most likely
        tokens."""
        parts = []
        for begin in range(0, len(tokens), _ROWS_AT_A_TIME):
            rows = slice(begin, begin + _ROWS_AT_A_TIME)
            logprobs = logits[rows].float().log_softmax(-1)
            chosen = logprobs.gather(-1, tokens[rows, None])
            top = logprobs.topk(k, dim=-1)
            parts.append((chosen[:, 0], (logprobs > chosen).sum(-1) + 1, top.indices, top.values))
        return cls(tokens, *(torch.cat(column) for column in zip(*parts, strict=True)))

    def to_host(self) -> LogprobRows:
        """Copies on the host, which are complete after an event that is recorded now."""
        return LogprobRows(*(tensor.to("cpu", non_blocking=True) for tensor in vars(self).values()))

    def ranked(self, begin: int, end: int, num_top: int) -> list[list[RankedToken]]:
        """For each row from ``begin`` to ``end``: the chosen token, then the ``num_top`` most likely tokens; -1:
        all."""
        width = self.top_tokens.shape[1] if num_top < 0 else num_top
        rows = (
            tensor[begin:end].tolist()
            for tensor in (
                self.tokens,
                self.logprobs,
                self.ranks,
                self.top_tokens[:, :width],
                self.top_logprobs[:, :width],
            )
        )
        return [
            [(token, logprob, rank), *zip(top_tokens, top_logprobs, range(1, width + 1), strict=True)]
            for token, logprob, rank, top_tokens, top_logprobs in zip(*rows, strict=True)
        ]


def num_top_tokens(requested: list[int | None], vocabulary: int) -> int | None:
    """The maximum of several ``logprobs`` values; None if log-probabilities are not requested."""
    counts = [vocabulary if one == -1 else one for one in requested if one is not None]
    return max(counts, default=None)
