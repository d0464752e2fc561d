import pytest
import torch

from flashlatte.testing.compare import Tolerance, assert_accurate, assert_close, bf16_ulp, deviation

LOOSE = Tolerance(1e-3, 1e-2, 1.0)


def test_close_values_pass():
    x = torch.randn(4, 5)
    assert_close(x, x, Tolerance(0.0, 0.0, 1e-12))
    assert_close(x + 5e-4, x, LOOSE)
    assert_close(100 * x * 1.005, 100 * x, LOOSE)


def test_a_wrong_element_is_reported_with_its_index():
    expected = torch.full((4, 5), 1.0)
    actual = expected.clone()
    actual[2, 3] = 1.5
    with pytest.raises(AssertionError, match=r"^out: 1 of 20 elements .* at \[2, 3\]: 1\.5 instead of 1$"):
        assert_close(actual, expected, LOOSE, "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_values_must_have_the_same_indices(value):
    expected = torch.tensor([1.0, value, 2.0])
    assert_close(expected.clone(), expected, LOOSE)
    for other in (torch.tensor([1.0, 0.0, 2.0]), torch.tensor([value, value, 2.0])):
        with pytest.raises(AssertionError, match="at other positions than expected"):
            assert_close(other, expected, LOOSE)
        with pytest.raises(AssertionError, match="at other positions than expected"):
            assert_accurate(other, expected, expected)


def test_the_two_infinities_are_not_the_same():
    x = torch.tensor([1.0, float("inf")])
    with pytest.raises(AssertionError, match="at other positions than expected"):
        assert_close(x * torch.tensor([1.0, -1.0]), x, LOOSE)


def test_many_small_errors_in_one_direction_are_a_cosine_difference():
    expected = torch.ones(1000)
    with pytest.raises(AssertionError, match="cosine difference"):
        assert_close(expected * 1.005, expected, Tolerance(1e-3, 1e-2, 1e-6))


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"shape \[2\] instead of \[3\]"):
        assert_close(torch.zeros(2), torch.zeros(3), LOOSE)


def test_deviation_is_that_of_the_element_nearest_to_its_limit():
    expected = torch.tensor([100.0, 1.0, float("inf"), float("nan")])
    actual = torch.tensor([100.5, 1.002, float("inf"), float("nan")])
    error, allowed = deviation(actual, expected, Tolerance(1e-3, 1e-2))
    assert (error, allowed) == pytest.approx((0.5, 1.0), rel=1e-3)
    error, allowed = deviation(actual, expected, Tolerance(1e-3, 1e-3))
    assert (error, allowed) == pytest.approx((0.5, 0.1), rel=1e-3)
    assert deviation(expected, expected, Tolerance(0.0, 0.0)) == (0.0, 0.0)
    error, _ = deviation(torch.tensor([1.0, float("inf")]), torch.tensor([1.5, 1.0]), LOOSE)
    assert error == float("inf")
    error, _ = deviation(torch.tensor([1.5, 1.0]), torch.tensor([1.0, float("nan")]), LOOSE)
    assert error != error
    assert deviation(torch.zeros(0), torch.zeros(0), LOOSE) == (0.0, 1e-3)
    with pytest.raises(AssertionError, match="shape"):
        deviation(torch.zeros(2), torch.zeros(3), LOOSE)


def test_accurate_is_twice_the_baseline_and_an_ulp():
    oracle = torch.ones(8, dtype=torch.float64)
    baseline = oracle + 0.01
    assert_accurate(oracle + 0.0277, oracle, baseline)
    with pytest.raises(AssertionError, match="8 of 8 elements are wrong by more than twice"):
        assert_accurate(oracle + 0.0279, oracle, baseline)


@pytest.mark.parametrize("value", [1.0, 1.99, -3.0, 448.0, 0.013, 2.0**-126])
def test_bf16_ulp_is_the_distance_to_the_next_number(value):
    x = torch.tensor(value).abs().to(torch.bfloat16)
    following = (x.view(torch.int16) + 1).view(torch.bfloat16)
    below_power_of_two = x.double() > abs(value) and torch.frexp(x)[0] == 0.5
    expected = (following.double() - x.double()) / (2 if below_power_of_two else 1)
    assert bf16_ulp(torch.tensor(value)) == expected


def test_bf16_ulp_of_zero_is_the_smallest_number():
    assert bf16_ulp(torch.zeros(())).item() == 2.0**-133
