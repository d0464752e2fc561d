"""Judging a result: FlashMLA's three-fold check, and the error measured against a float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BF16_MANTISSA_BITS = 7
BF16_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Tolerance:
    """What a result may differ by: each element by ``abs`` or by ``rel`` · |expected|, the whole by ``cos``.

    Attributes:
        abs: largest absolute difference of an element.
        rel: largest difference of an element relative to |expected| + 1e-6.
        cos: largest 1 - 2⟨x, y⟩ / (‖x‖² + ‖y‖²) over all finite elements.
    """

    abs: float
    rel: float
    cos: float = 1e-7


# FlashMLA's own tolerances (commit 9241ae3, tests/).
DENSE_DECODE_OUT = Tolerance(8e-4, 2.01 / 128, 5e-6)
SPARSE_DECODE_OUT = Tolerance(1e-3, 2.01 / 128, 5e-6)
SPARSE_PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
DENSE_PREFILL_OUT = DENSE_PREFILL_GRADIENT = Tolerance(1e-3, 8.01 / 128, 7e-6)
SPARSE_ATTENTION_GRADIENT = DENSE_PREFILL_GRADIENT
DENSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)
DECODE_LSE = Tolerance(1e-6, 8.01 / 65536)
SPARSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)

# What float32 arithmetic on float32 inputs keeps of sums of a few thousand terms.
FLOAT32 = Tolerance(2e-6, 2e-5, 1e-9)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, name: str = "result") -> None:
    """FlashMLA's check: infinities and NaN in the same places, every element and the direction within tolerance.

    Raises:
        AssertionError: with the number of wrong elements and the worst of them.
    """
    actual, expected = _comparable(actual, expected, name)
    finite = _same_nonfinite(actual, expected, name)
    difference = torch.where(finite, (actual - expected).abs(), 0.0)
    relative = difference / (expected.abs() + 1e-6)
    wrong = finite & (difference > tolerance.abs) & (relative > tolerance.rel)
    if wrong.any():
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ by more than {tolerance.abs:.3g} and by "
            f"more than {tolerance.rel:.3g} of their size; {_worst(difference, actual, expected)}"
        )
    cosine = _cosine_difference(actual[finite], expected[finite])
    if cosine > tolerance.cos:
        raise AssertionError(f"{name}: cosine difference {cosine:.3g}, accepted is {tolerance.cos:.3g}")


def assert_accurate(actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, name: str = "result") -> None:
    """Every error against a float64 oracle at most twice the baseline's largest, plus one bf16 ulp of the element.

    Args:
        actual: the result judged.
        oracle: the same in float64.
        baseline: the same by plain PyTorch in bf16 (``oracles`` with dtype=torch.bfloat16).
        name: of the result, for the message.

    Raises:
        AssertionError: with the number of wrong elements and the worst of them.
    """
    actual, oracle = _comparable(actual, oracle, name)
    baseline, oracle = _comparable(baseline, oracle, f"baseline of {name}")
    finite = _same_nonfinite(actual, oracle, name)
    baseline_error = torch.where(finite, (baseline - oracle).abs(), 0.0).max().item() if oracle.numel() else 0.0
    error = torch.where(finite, (actual - oracle).abs(), 0.0)
    wrong = finite & (error > 2 * baseline_error + bf16_ulp(oracle))
    if wrong.any():
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong by more than twice the bf16 baseline's "
            f"largest error {baseline_error:.3g} and one bf16 ulp; {_worst(error, actual, oracle)}"
        )


def bf16_ulp(x: torch.Tensor) -> torch.Tensor:
    """Distance between bf16 numbers at each value of x, as float64."""
    _, exponent = torch.frexp(x.double().abs().clamp_min(BF16_SMALLEST_NORMAL))  # x in [2^(exponent - 1), 2^exponent)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1 - BF16_MANTISSA_BITS)


def _comparable(actual: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)} instead of {list(expected.shape)}")
    return actual.detach().double(), expected.detach().to(actual.device).double()


def _same_nonfinite(actual: torch.Tensor, expected: torch.Tensor, name: str) -> torch.Tensor:
    """Where both are finite; an AssertionError if inf, -inf and NaN are not in the same places."""
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(actual) != test(expected)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"{name}: {kind} in other places than expected, {int(wrong.sum())} times; first at {at}: "
                f"{actual[tuple(at)].item()} instead of {expected[tuple(at)].item()}"
            )
    return expected.isfinite()


def _cosine_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    squares = (actual.square().sum() + expected.square().sum()).item()
    return 1 - 2 * (actual * expected).sum().item() / squares if squares else 0.0


def _worst(difference: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    at = torch.unravel_index(difference.argmax(), difference.shape)
    return f"the largest, at {[int(i) for i in at]}: {actual[at].item():.6g} instead of {expected[at].item():.6g}"
