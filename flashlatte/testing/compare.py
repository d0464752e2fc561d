"""Checks of a result: FlashMLA's three criteria, and the error relative to a float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BF16_MANTISSA_BITS = 7
BF16_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Tolerance:
    """Accepted differences: each element within ``abs`` or ``rel`` · |expected|, the whole tensor within ``cos``.

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
INDEXER_LOSS = Tolerance(1e-5, 1e-4)
INDEXER_LOSS_GRADIENT = DENSE_PREFILL_GRADIENT
DENSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)
DECODE_LSE = Tolerance(1e-6, 8.01 / 65536)
SPARSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)

# e4m3 products: a kernel and the reference round P relative to different maxima, and each is off by up to 8%.
DENSE_DECODE_FP8_OUT = Tolerance(8e-4, 2.01 / 128, 1e-2)
SPARSE_PREFILL_FP8_OUT = Tolerance(1e-3, 3.01 / 128, 1e-2)

# Rounding error of float32 sums of a few thousand terms.
FLOAT32 = Tolerance(2e-6, 2e-5, 1e-9)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, name: str = "result") -> None:
    """FlashMLA's check: same positions of infinities and NaN; elements and cosine difference within tolerance.

    Raises:
        AssertionError: a criterion fails; the message gives the number of wrong elements and the worst one.
    """
    actual, expected = _comparable(actual, expected, name)
    finite = _same_nonfinite(actual, expected, name)
    difference = torch.where(finite, (actual - expected).abs(), 0.0)
    relative = difference / (expected.abs() + 1e-6)
    wrong = finite & (difference > tolerance.abs) & (relative > tolerance.rel)
    if wrong.any():
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ by more than {tolerance.abs:.3g} and by "
            f"more than {tolerance.rel:.3g} of their magnitude; {_worst(difference, actual, expected)}"
        )
    cosine = _cosine_difference(actual[finite], expected[finite])
    if cosine > tolerance.cos:
        raise AssertionError(f"{name}: cosine difference {cosine:.3g}, accepted is {tolerance.cos:.3g}")


def deviation(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> tuple[float, float]:
    """The error and the accepted error of the element with the largest ratio of the two.

    Infinities and NaN at the same positions are ignored; the error is inf or NaN where only one of the two has one.

    Raises:
        AssertionError: the shapes differ.
    """
    actual, expected = _comparable(actual, expected, "result")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (actual - expected).abs())
    allowed = (tolerance.rel * (expected.abs() + 1e-6)).clamp_min(tolerance.abs)
    if not difference.numel():
        return 0.0, tolerance.abs
    share = (difference / allowed.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=torch.inf)
    share = torch.where(same, 0.0, share)
    at = torch.unravel_index(share.argmax(), share.shape)
    return difference[at].item(), allowed[at].nan_to_num(nan=tolerance.abs, posinf=tolerance.abs).item()


def assert_accurate(actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, name: str = "result") -> None:
    """Check that each element's error is at most twice the baseline's largest error plus one bf16 ulp of the element.

    Args:
        actual: the result to check.
        oracle: the float64 result.
        baseline: the result of plain PyTorch in bf16 (``oracles`` with dtype=torch.bfloat16).
        name: name of the result, for the message.

    Raises:
        AssertionError: an error is too large; the message gives the number of wrong elements and the worst one.
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
    """Spacing of bf16 values at each element of x, as float64."""
    _, exponent = torch.frexp(x.double().abs().clamp_min(BF16_SMALLEST_NORMAL))  # x in [2^(exponent - 1), 2^exponent)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1 - BF16_MANTISSA_BITS)


def _comparable(actual: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)} instead of {list(expected.shape)}")
    return actual.detach().double(), expected.detach().to(actual.device).double()


def _same_nonfinite(actual: torch.Tensor, expected: torch.Tensor, name: str) -> torch.Tensor:
    """Mask of the finite elements. Raises AssertionError if inf, -inf or NaN differ in position."""
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(actual) != test(expected)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"{name}: {kind} at other positions than expected, {int(wrong.sum())} times; first at {at}: "
                f"{actual[tuple(at)].item()} instead of {expected[tuple(at)].item()}"
            )
    return expected.isfinite()


def _cosine_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    squares = (actual.square().sum() + expected.square().sum()).item()
    return 1 - 2 * (actual * expected).sum().item() / squares if squares else 0.0


def _worst(difference: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    at = torch.unravel_index(difference.argmax(), difference.shape)
    return f"the largest, at {[int(i) for i in at]}: {actual[at].item():.6g} instead of {expected[at].item():.6g}"
