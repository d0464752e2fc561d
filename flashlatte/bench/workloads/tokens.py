"""Operations that compute each token independently; the reference computes only some of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads.base import POISON_BYTE, Outputs, Results, Workload, spread
from flashlatte.runtime import dispatch

COMPARED_TOKENS = 64
MAX_POSITION, ROPE = 16384, 64


class TokensWorkload(Workload):
    """Base of these workloads: a subclass defines ``compute``."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype, tokens: int, **facts: Any) -> None:
        self.call = dispatch.CallSpec(problem.operation, device, dtype, **facts)
        self.chosen = spread(tokens, COMPARED_TOKENS, device)
        self._result_bytes: Sequence[int] = ()

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        results = super().run(backend, outputs)
        self._result_bytes = [result.numel() * result.element_size() for result in results.values()]
        return results

    def poisoned_outputs(self) -> Outputs:
        """Memory that the operation is likely to reuse is poisoned and freed."""
        device = self.call.device
        poisoned = [torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device) for size in self._result_bytes]
        del poisoned
        return {}


def rotations(rng: torch.Generator) -> torch.Tensor:
    """Cosines and sines, float32 [positions, 64]."""
    angles = torch.rand(MAX_POSITION, ROPE // 2, generator=rng, device=rng.device) * 6.283
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def positions(tokens: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(MAX_POSITION, (tokens,), generator=rng, device=rng.device)
