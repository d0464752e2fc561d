"""The interface of workloads."""

from __future__ import annotations

import abc
from functools import cached_property
from types import EllipsisType
from typing import Any, ClassVar

import torch

from flashlatte.bench.problems import Problem
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance, assert_close

Results = dict[str, torch.Tensor]
Outputs = dict[str, Any]  # tensors to write into, by the operation's argument names
Rows = torch.Tensor | EllipsisType
ALL = ...
POISON_BYTE = 0xFF

EQUAL = Tolerance(0.0, 0.0)
# bf16 of float32 sums in another order; e4m3 of these (a step is an eighth); four bits, few of which may differ.
ROUNDED = Tolerance(1e-3, 2.01 / 128, 1e-5)
ONE_BYTE = Tolerance(2e-3, 0.13, 1e-5)
FOUR_BITS = Tolerance(1.0, 0.51, 1e-4)


class WrongResult(Exception):
    """A result differs from the reference by more than the tolerance; the message gives the position."""


class Workload(abc.ABC):
    """Tensors of a problem on a device. A class names the kind of problem that it prepares.

    Attributes:
        call: dispatch's description of the call, which selects an implementation.
        flops: 2 · h_q · (d_qk + d_v) for each query token and key it attends to; None where nothing is multiplied.
        bytes_moved: q, out and each distinct key once; for cache operations the bytes read and written.
        tolerances: tolerance of each result: FlashMLA's tests', or 0 if bytes must be equal.
        chosen: the rows (requests or tokens) of each result that the slow reference runs for and that are compared.
        overlaps: whether calls may run at the same time; False if a call updates its arguments.
        captures: whether a CUDA graph may capture a call.
        repeats: whether results of repeated calls are bitwise equal.
    """

    kinds: ClassVar[dict[type[Problem], Any]] = {}

    call: dispatch.CallSpec
    flops: int | None = None
    bytes_moved: int
    tolerances: dict[str, Tolerance]
    chosen: Rows = ALL
    overlaps: bool = True
    captures: bool = True
    repeats: bool = True

    def __init_subclass__(cls, problem: type[Problem] | None = None) -> None:
        if problem is not None:
            Workload.kinds[problem] = cls

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        """One call of the operation, into ``outputs`` if given; the call that is timed."""
        return self.compute(ALL, backend, **(outputs or {}))

    @abc.abstractmethod
    def compute(self, rows: Rows, backend: str, *args: Any, **outputs: Any) -> Results:
        """A call for some of the rows. ``outputs`` may also have further arguments of the operation."""

    def poisoned_outputs(self) -> Outputs:
        """Outputs full of NaN, to check that all are written. May reset tensors that ``run`` writes in place."""
        return {}

    def compared(self, results: Results) -> Results:
        """The values of the chosen rows, by the names of ``tolerances``."""
        return self.read({name: result[self.chosen] for name, result in results.items()})

    def reference(self) -> Results:
        """These values by the reference implementation on the same device."""
        return self.read(self.compute(self.chosen, "reference"))

    def read(self, results: Results) -> Results:
        """Results of some rows as values, by the names of ``tolerances``."""
        return results

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


class CacheWriter(Workload):
    """An operation that writes rows into ``cache``, which ``compute`` returns as "cache"; ``slots`` of them are
    compared."""

    cache: torch.Tensor
    layout: Any
    slots: torch.Tensor

    @abc.abstractmethod
    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        """A call for some of the rows, into ``self.cache`` if ``cache`` is None."""

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(-7 if self.cache.is_floating_point() else POISON_BYTE)
        return super().poisoned_outputs()

    def compared(self, results: Results) -> Results:
        return self.read({name: x if name == "cache" else x[self.chosen] for name, x in results.items()})

    def reference(self) -> Results:
        return self.read(self.compute(self.chosen, "reference", torch.zeros_like(self.cache)))

    def read(self, results: Results) -> Results:
        """The other results, and the written rows as "keys"."""
        others = {name: result for name, result in results.items() if name != "cache"}
        keys = self.layout.decode(self.layout.page_views(results["cache"]), 1.0).flatten(0, 1)
        return others | {"keys": keys[self.slots[self.chosen]]}


def compare(results: Results, expected: Results, tolerances: dict[str, Tolerance]) -> None:
    """Raise WrongResult if one of the results with a tolerance differs by more."""
    for name, tolerance in tolerances.items():
        try:
            assert_close(results[name], expected[name], tolerance, name)
        except AssertionError as error:
            raise WrongResult(str(error)) from error


def nan_decode_outputs(q: torch.Tensor, head_dim_v: int) -> Outputs:
    """Outputs full of NaN of decode with q [b, s_q, h_q, head_dim]."""
    lse = torch.full(q.shape[:-1], torch.nan, dtype=torch.float32, device=q.device)
    return {"out": nan_like(q[..., :head_dim_v]).contiguous(), "lse": lse.transpose(1, 2)}


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def spread(count: int, at_most: int, device: torch.device) -> torch.Tensor:
    """Up to ``at_most`` of ``count`` positions, the first and the last among them, evenly spread; int64."""
    chosen = min(count, max(at_most, 1))
    return torch.linspace(0, count - 1, chosen, device=device, dtype=torch.float64).round().long()
