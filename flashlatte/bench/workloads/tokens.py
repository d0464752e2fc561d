"""Operations that compute each token independently; the reference computes only some of the tokens."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from flashlatte.bench.problems import Problem
from flashlatte.bench.workloads.base import Outputs, Results, Workload, spread
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

COMPARED_TOKENS = 64
MAX_POSITION, ROPE = 16384, 64
POISON_BYTE = 0xFF

EQUAL = Tolerance(0.0, 0.0)
# bf16 of float32 sums in another order; e4m3 of these (a step is an eighth); four bits, few of which may differ.
ROUNDED = Tolerance(1e-3, 2.01 / 128, 1e-5)
ONE_BYTE = Tolerance(2e-3, 0.13, 1e-5)
FOUR_BITS = Tolerance(1.0, 0.51, 1e-4)

Tokens = torch.Tensor | slice
ALL = slice(None)


class TokensWorkload(Workload):
    """Base of these workloads: a subclass defines ``compute``."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype, tokens: int, **facts: Any) -> None:
        self.call = dispatch.CallSpec(problem.operation, device, dtype, **facts)
        self.chosen = spread(tokens, COMPARED_TOKENS, device)
        self._result_bytes: Sequence[int] = ()

    @abc.abstractmethod
    def compute(self, tokens: Tokens, backend: str) -> Results:
        """Results whose first axis is the tokens given."""

    def read(self, results: Results) -> Results:
        """Results of some tokens as floating-point values, by the names of ``tolerances``."""
        return results

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        results = self.compute(ALL, backend)
        self._result_bytes = [result.numel() * result.element_size() for result in results.values()]
        return results

    def poisoned_outputs(self) -> Outputs:
        """The operation allocates its outputs: memory that it is likely to reuse is poisoned and freed."""
        device = self.call.device
        poisoned = [torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device) for size in self._result_bytes]
        del poisoned
        return {}

    def compared(self, results: Results) -> Results:
        return self.read({name: result[self.chosen] for name, result in results.items()})

    def reference(self) -> Results:
        return self.read(self.compute(self.chosen, "reference"))


def rotations(rng: torch.Generator) -> torch.Tensor:
    """Cosines and sines, float32 [positions, 64]."""
    angles = torch.rand(MAX_POSITION, ROPE // 2, generator=rng, device=rng.device) * 6.283
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def positions(tokens: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(MAX_POSITION, (tokens,), generator=rng, device=rng.device)


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
