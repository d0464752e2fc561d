"""Codebooks against the conditions of an optimal one, integrated numerically, and against published tables."""

import math

import pytest

from flashlatte.kv_cache.lloyd_max import lloyd_max, midpoints

# J. Max, Quantizing for Minimum Distortion (1960), table I: the positive outputs for 8 and 16 levels.
MAX_1960 = {3: (0.2451, 0.7560, 1.344, 2.152), 4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)}
# What vLLM 0.20's TurboQuant computes for N(0, 1/128), by the trapezoidal rule.
VLLM_128 = {
    3: (0.0216537, 0.0667903, 0.1187215, 0.1900658),
    4: (0.0113515, 0.0343069, 0.0580605, 0.0833014, 0.1110385, 0.1430019, 0.1828266, 0.2413817),
}


def integral(function, a, b, steps=20000):
    """Numerical integral by Simpson's rule."""
    width = (b - a) / steps
    inner = sum((4 if i % 2 else 2) * function(a + i * width) for i in range(1, steps))
    return (function(a) + inner + function(b)) * width / 3


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_centroids_are_the_means_of_their_cells(bits):
    centroids = lloyd_max(bits)
    assert list(centroids) == sorted(centroids)
    assert len(centroids) == 2**bits
    edges = [-12.0, *midpoints(bits), 12.0]
    for low, centroid, high in zip(edges, centroids, edges[1:], strict=False):
        weight = integral(lambda x: math.exp(-x * x / 2), low, high)
        mean = integral(lambda x: x * math.exp(-x * x / 2), low, high) / weight
        assert centroid == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("bits", [3, 4])
def test_published_tables(bits):
    positive = lloyd_max(bits)[2 ** (bits - 1) :]
    assert positive == pytest.approx(MAX_1960[bits], abs=5e-4)
    scaled = [x * 128**-0.5 for x in positive]
    assert scaled[:-1] == pytest.approx(VLLM_128[bits][:-1], abs=1e-4)
    # The trapezoidal rule is off by so much in the outermost cell, which reaches to 10.5 standard deviations.
    assert scaled[-1] == pytest.approx(VLLM_128[bits][-1], abs=2e-4)
