"""The interface of workloads."""

from __future__ import annotations

import abc
from functools import cached_property
from typing import Any

import torch

from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance, assert_close

Results = dict[str, torch.Tensor]
Outputs = dict[str, Any]  # tensors to write into, by the operation's argument names


class WrongResult(Exception):
    """A result differs from the reference by more than the tolerance; the message gives the position."""


class Workload(abc.ABC):
    """Tensors of a problem on a device.

    Attributes:
        call: dispatch's description of the call, which selects an implementation.
        flops: 2 · h_q · (d_qk + d_v) for each query token and key it attends to; None where nothing is multiplied.
        bytes_moved: q, out and each distinct key once; for cache operations the bytes read and written.
        tolerances: tolerance of each result: FlashMLA's tests', or 0 if bytes must be equal.
        overlaps: whether calls may run at the same time; False if a call updates its arguments.
        captures: whether a CUDA graph may capture a call.
        repeats: whether results of repeated calls are bitwise equal.
    """

    call: dispatch.CallSpec
    flops: int | None = None
    bytes_moved: int
    tolerances: dict[str, Tolerance]
    overlaps: bool = True
    captures: bool = True
    repeats: bool = True

    @abc.abstractmethod
    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        """One call of the operation, into ``outputs`` if given; the call that is timed."""

    @abc.abstractmethod
    def poisoned_outputs(self) -> Outputs:
        """Outputs full of NaN, to check that all are written. May reset tensors that ``run`` writes in place."""

    def compared(self, results: Results) -> Results:
        """The part of the results that is compared with the slow reference (``…_COMPARED`` of a workload)."""
        return results

    def reference(self) -> Results:
        """The ``compared`` part of the results, from the reference implementation on the same device."""
        return self.compared(self.run("reference"))

    def defined(self, results: Results) -> Results:
        """The results, with zeros for undefined elements. Bitwise the same in each call."""
        return results

    @cached_property
    def expected(self) -> Results:
        return self.reference()

    def check(self, results: Results) -> None:
        """Compare with the reference.

        Raises:
            WrongResult: if they differ. No case has a row without keys, so nothing may be NaN or infinite.
        """
        results = self.defined(results)
        for name, result in results.items():
            if result.is_floating_point():
                # PyTorch has no isfinite of one-byte floats.
                finite = torch.isfinite(result.float() if result.element_size() == 1 else result)
                if not bool(finite.all()):
                    raise WrongResult(f"{name}: NaN or infinite in {int((~finite).sum())} elements")
        compare(self.compared(results), self.expected, self.tolerances)


def compare(results: Results, expected: Results, tolerances: dict[str, Tolerance]) -> None:
    """Raise WrongResult if one of the results with a tolerance differs by more."""
    for name, tolerance in tolerances.items():
        try:
            assert_close(results[name], expected[name], tolerance, name)
        except AssertionError as error:
            raise WrongResult(str(error)) from error


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


def spread(count: int, at_most: int, device: torch.device) -> torch.Tensor:
    """Up to ``at_most`` of ``count`` positions, the first and the last among them, evenly spread; int64."""
    chosen = min(count, max(at_most, 1))
    return torch.linspace(0, count - 1, chosen, device=device, dtype=torch.float64).round().long()
