"""Head weights of index queries compared with float64, in both implementations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte.ops.index_weights import api, index_weights
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


@given(
    tokens=st.sampled_from([0, 1, 4, 5, 9, 17]),
    heads=st.integers(1, 9),
    width=st.sampled_from([1, 24, 130, 512, 1500]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    gap=st.sampled_from([0, 3, 8]),
    seed=st.integers(0, 9),
)
def test_against_float64(tokens, heads, width, dtype, gap, seed):
    generator = torch.Generator().manual_seed(seed)
    # Memory between the rows is not read.
    hidden = torch.full((tokens, width + gap), torch.nan, dtype=dtype)
    hidden[:, :width] = torch.randn(tokens, width, generator=generator)
    weight = torch.full((heads, width + gap), torch.nan)
    weight[:, :width] = torch.randn(heads, width, generator=generator) * width**-0.5
    hidden, weight = hidden[:, :width], weight[:, :width]
    result = index_weights(hidden, weight, backend=BACKEND)
    assert result.dtype == torch.float32
    expected = hidden.double() @ weight.double().T
    # The rounding of each sum's terms, of which there are as many as the row is wide.
    bound = (hidden.double().abs() @ weight.double().abs().T) * width**0.5 * 2.0**-24 + 1e-30
    assert ((result - expected).abs() <= 2 * bound + 2.0**-23 * expected.abs()).all()


def test_a_nan_stays_in_its_row():
    hidden, weight = torch.ones(9, 40), torch.ones(5, 40)
    hidden[3, 7] = torch.nan
    result = index_weights(hidden, weight, backend=BACKEND)
    assert result.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert (result[[0, 1, 2, 4, 8]] == 40).all()


HIDDEN, WEIGHT = torch.zeros(3, 8), torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": HIDDEN.int()}, TypeError, "^hidden must be bfloat16 or float16 or float32, got int32"),
        ({"hidden": HIDDEN[0]}, ValueError, r"^hidden must have shape \[T, n\]"),
        ({"weight": WEIGHT.half()}, TypeError, "^weight must be float32, got float16$"),
        ({"weight": WEIGHT[:, :7]}, ValueError, r"^weight must have shape \[H, 8\]"),
        ({"weight": WEIGHT.to("meta")}, ValueError, "^weight must be on cpu like the other arguments"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of index_weights: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        index_weights(**({"hidden": HIDDEN, "weight": WEIGHT} | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "index_weights", lambda: index_weights(HIDDEN, WEIGHT))
