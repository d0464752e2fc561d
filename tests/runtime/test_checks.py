import math
import warnings

import numpy as np
import pytest
import torch

from flashlatte.runtime import checks

FLOATS = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


def test_tensor_is_returned_as_it_is():
    x = torch.zeros(2, 3)
    assert checks.tensor("x", x, ("n", 3), FLOATS, CPU) is x


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their interface is a prototype
        return torch.nested.nested_tensor([torch.zeros(3)])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1.0], TypeError, r"^x must be a tensor, got list$"),
        (torch.zeros(2, 3).to_sparse(), TypeError, r"^x must be a strided tensor, got layout torch.sparse_coo$"),
        (nested_tensor(), TypeError, r"^x must be a strided tensor, got a nested tensor$"),
        (torch.zeros(2, 3, dtype=torch.float16), TypeError, r"^x must be float32 or bfloat16, got float16$"),
        (torch.zeros(2), ValueError, r"^x must have shape \[n, 3\] with no empty axis, got \[2\]$"),
        (torch.zeros(2, 4), ValueError, r"^x must have shape \[n, 3\] with no empty axis, got \[2, 4\]$"),
        (torch.zeros(0, 3), ValueError, r"^x must have shape \[n, 3\] with no empty axis, got \[0, 3\]$"),
        (torch.zeros(2, 3, device="meta"), ValueError, r"^x must be on cpu like the other arguments, got meta$"),
        (torch.zeros(3, 2).T, ValueError, r"^x must have last stride 1, got strides \(1, 2\)$"),
    ],
    ids=["type", "layout", "nested", "dtype", "rank", "size", "empty", "device", "stride"],
)
def test_tensor_errors_name_the_problem(value, error, message):
    with pytest.raises(error, match=message):
        checks.tensor("x", value, ("n", 3), FLOATS, CPU)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_given_tensor_is_strided():
    x = torch.zeros(2, 3)
    assert checks.given("x", x) is x
    for other in (x.to_sparse(), x.to_sparse_csr(), nested_tensor(), x.to_mkldnn(), None):
        assert not checks.is_strided(other)
        with pytest.raises(TypeError, match=r"^x must be a (strided )?tensor, got (layout torch|a nested tensor|None)"):
            checks.given("x", other)


def test_last_stride_is_free_where_it_may_be_or_does_not_matter():
    checks.tensor("x", torch.zeros(3, 2).T, ("n", 3), FLOATS, unit_last_stride=False)
    checks.tensor("x", torch.zeros(2, 4)[:, ::4], ("n", 1), FLOATS)


def test_an_axis_may_be_empty_where_it_must_be():
    checks.tensor("x", torch.zeros(0, 3), (0, "width"), FLOATS)


def test_strides_of_a_tensor_without_elements_are_not_checked():
    x = torch.from_numpy(np.zeros((0, 3), np.float32))
    assert x.stride() == (0, 0)
    assert checks.output("x", x, ("n", 3), FLOATS, may_be_empty=1) is x


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_positive_int(value, error):
    assert checks.positive_int("size", 1) == 1
    with pytest.raises(error, match=r"^size must be"):
        checks.positive_int("size", value)


@pytest.mark.parametrize("value", [np.int32(3), np.uint8(3), np.int64(3)])
def test_integers_and_numbers_may_be_numpys(value):
    checked = checks.positive_int("size", value)
    assert (checked, type(checked)) == (3, int)
    number = checks.number("x", np.float32(value))
    assert (number, type(number)) == (3.0, float)
    with pytest.raises(TypeError, match=r"^size must be an int, got"):
        checks.positive_int("size", np.True_)


@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_flag(value):
    assert checks.flag("causal", True) is True
    with pytest.raises(TypeError, match=r"^causal must be True or False, got"):
        checks.flag("causal", value)


@pytest.mark.parametrize("value", ["1", None, True, torch.tensor(1.0)])
def test_number(value):
    assert checks.number("x", 2) == 2.0
    with pytest.raises(TypeError, match=r"^x must be a number, got"):
        checks.number("x", value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_softmax_scale_refuses(value):
    with pytest.raises(ValueError, match=r"^softmax_scale must be a finite number above 0, got"):
        checks.softmax_scale(value, 64)


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (checks.softmax_scale, 1e39, r"^scale must be a number that is a normal float32, got 1e\+39$"),
        (checks.softmax_scale, 1e38, r"^scale must be at most 2\^125, got 1e\+38$"),
        (checks.float32_factor, 1e-39, "^scale must be a number that is a normal float32, got 1e-39$"),
        (checks.number, 10**400, "^scale must be a number in the range of float, got 1000"),
        (checks.positive_int, 2**63, "^scale must fit 64 bits, got 9223372036854775808$"),
    ],
)
def test_numbers_that_a_kernel_could_not_take_are_refused(check, value, message):
    with pytest.raises(ValueError, match=message):
        check(value, 64, "scale") if check is checks.softmax_scale else check("scale", value)


def test_softmax_scale():
    assert checks.softmax_scale(None, 64) == 0.125
    assert checks.softmax_scale(2, 64) == 2.0
    with pytest.raises(TypeError, match=r"^sm_scale must be a number, got str$"):
        checks.softmax_scale("2", 64, "sm_scale")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, math.nan, 1e30])
def test_empty_lse_is_an_infinity(value):
    assert checks.empty_lse(-math.inf) == -math.inf
    assert checks.empty_lse(math.inf) == math.inf
    with pytest.raises(ValueError, match=r"^empty_lse must be float\('inf'\) or float\('-inf'\), got"):
        checks.empty_lse(value)


def test_choice():
    checks.choice("mode", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^mode must be one of a, b, got 'c'$"):
        checks.choice("mode", "c", ("a", "b"))


def test_an_output_is_given_or_new():
    shape, x = (2, 3), torch.ones(2, 3)
    given = torch.ones(3, 2).T
    assert checks.output_or_new("out", given, shape, torch.float32, CPU, unit_last_stride=False, x=x) is given
    new = checks.output_or_new("out", None, shape, torch.bfloat16, CPU, zeros=True, x=x)
    assert new.equal(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^out must have last stride 1"):
        checks.output_or_new("out", given, shape, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"^out must share no memory with x"):
        checks.output_or_new("out", x, shape, torch.float32, CPU, x=x)


def test_indices_have_any_stride():
    strided = torch.arange(6, dtype=torch.int32)[::2]
    assert checks.indices("slots", strided, ("n",), CPU) is strided
    with pytest.raises(TypeError, match=r"^slots must be int32 or int64, got float32"):
        checks.indices("slots", torch.ones(3), ("n",))


def test_a_block_table_without_requests_may_have_no_pages():
    checks.block_table(torch.empty(0, 0, dtype=torch.int64), 0, CPU)
    with pytest.raises(ValueError, match=r"^block_table must have shape \[2, max_pages\] with no empty axis"):
        checks.block_table(torch.empty(2, 0, dtype=torch.int64), 2, CPU)


def test_an_output_has_a_place_for_every_element():
    checks.output("out", torch.empty(2, 1, 3).expand(2, 1, 3), (2, 1, 3), (torch.float32,))
    with pytest.raises(ValueError, match=r"^out must not be an expanded tensor, got strides \(0, 1\)$"):
        checks.output("out", torch.empty(1, 3).expand(2, 3), (2, 3), (torch.float32,))


def test_an_output_is_not_stored_negated():
    imaginary = torch.zeros(3, 1, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match=r"^out must not be a negated view, such as the imaginary part of a conj"):
        checks.output("out", imaginary, (3, 1), (torch.float32,))


@pytest.mark.parametrize("value", [-1e-6, math.inf, math.nan, 1e39])
def test_epsilon(value):
    assert checks.epsilon("eps", 0) == 0.0
    with pytest.raises(ValueError, match=r"^eps must be a finite number of at least 0 in float32, got"):
        checks.epsilon("eps", value)


def test_rows_of_a_buffer_that_begins_unaligned():
    """Tensors of ``torch.from_numpy`` and other packages may have any alignment at storage offset 0."""
    buffer = np.zeros(4 * 64 + 16, np.uint8)
    start = -buffer.ctypes.data % 16
    for shift, aligned in ((0, True), (4, False)):
        x = torch.from_numpy(buffer[start + shift : start + shift + 256]).view(4, 64)
        assert x.storage_offset() == 0
        assert checks.rows_aligned(x) is aligned
