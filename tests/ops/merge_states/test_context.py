"""Tokens without a context, e4m3 outputs, and vLLM's argument list."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import merge_attn_states, merge_states
from flashlatte.runtime import machine
from flashlatte.testing import compare, oracles
from flashlatte.testing.compare import assert_close

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []
EXACT = compare.Tolerance(1e-5, 2e-4, 1e-8)


def draw_parts(n, shape, seed, empty=0.2):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, *shape, generator=generator)
    lses = torch.randn(n, *shape[:-1], generator=generator) * 4
    hidden = torch.rand(lses.shape, generator=generator) < empty
    lses[hidden], outs[hidden] = math.inf, math.nan
    return outs, lses


def expected_with_context(outs, lses, context):
    """The oracle over all parts before ``context``, and the last part unchanged after it."""
    merged = oracles.merge_states(outs[:, :context], lses[:, :context])
    return torch.cat((merged[0], outs[-1, context:])), torch.cat((merged[1], lses[-1, context:]))


@given(
    n=st.integers(2, 18),
    tokens=st.integers(1, 5),
    axes=st.lists(st.integers(1, 3), max_size=2),
    context=st.integers(0, 6),
    on_device=st.sampled_from([None, torch.int32, torch.int64]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_tokens_without_context_take_the_last_part_alone(n, tokens, axes, context, on_device, transposed, seed):
    outs, lses = draw_parts(n, (tokens, *axes, 8), seed)
    expected = expected_with_context(outs, lses, min(context, tokens))
    outs[:-1, context:], lses[:-1, context:] = math.nan, math.nan  # not looked at
    given_context = context if on_device is None else torch.tensor([context], dtype=on_device)
    if transposed:
        lses = lses.transpose(1, -1).contiguous().transpose(1, -1)
    out, lse = merge_states(outs, lses, context_tokens=given_context, backend=BACKEND)
    assert_close(out, expected[0], EXACT, "out")
    assert_close(lse, expected[1], compare.FLOAT32, "lse")


@pytest.mark.parametrize("context", [-(2**62), -1, 2**62])
def test_a_context_of_any_number_on_the_device_is_safe(context):
    outs, lses = draw_parts(3, (4, 3, 8), 0)
    out, lse = merge_states(outs, lses, context_tokens=torch.tensor(context), backend=BACKEND)
    expected = expected_with_context(outs, lses, 0 if context < 0 else 4)
    assert_close(out, expected[0], EXACT, "out")
    assert_close(lse, expected[1], compare.FLOAT32, "lse")


def test_a_copied_lse_of_nan_does_not_change_its_out():
    outs, lses = draw_parts(3, (4, 3, 8), 0, empty=0.0)
    lses[-1, 2:] = math.nan
    out, lse = merge_states(outs, lses, context_tokens=2, backend=BACKEND)
    expected = expected_with_context(outs, lses, 2)
    assert_close(out, expected[0], EXACT, "out")
    assert lse[2:].isnan().all()
    assert_close(lse[:2], expected[1][:2], compare.FLOAT32, "lse")


def test_the_first_axis_in_halves():
    """With more axes than a kernel supports, the merge is split, also along the tokens."""
    outs, lses = draw_parts(2, (2, 3, 4, 5, 4), 0, empty=0.0)
    lses = lses.permute(0, 4, 2, 1, 3).contiguous().permute(0, 3, 2, 4, 1)
    outs = outs.permute(0, 3, 2, 4, 1, 5).contiguous().permute(0, 4, 2, 1, 3, 5)
    for context in range(3):
        out, lse = merge_states(outs, lses, context_tokens=context, backend=BACKEND)
        expected = expected_with_context(outs, lses, context)
        assert_close(out, expected[0], EXACT, "out")
        assert_close(lse, expected[1], compare.FLOAT32, "lse")


@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("on_device", [False, True])
def test_e4m3_is_the_float32_result_times_the_reciprocal_saturated(n, on_device):
    outs, lses = draw_parts(n, (5, 3, 16), n)
    outs[0, 0, 0] = 1e4
    lses[0, 0, 0] = 50.0
    exact, exact_lse = merge_states(outs, lses, backend=BACKEND)
    scale = 0.3
    given_scale = torch.tensor([scale]) if on_device else scale
    out, lse = merge_states(outs.bfloat16().float(), lses, out_scale=given_scale, backend=BACKEND)
    rounded, _ = merge_states(outs.bfloat16().float(), lses, backend=BACKEND)
    expected = (rounded * (1 / torch.tensor(scale))).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert out.dtype == torch.float8_e4m3fn
    assert out.float().equal(expected.float())
    assert out.float()[0, 0].eq(448).all()
    assert lse.equal(exact_lse)
    assert exact.shape == out.shape


@given(context=st.sampled_from([None, 0, 2, 7]), seed=st.integers(0, 2**32))
def test_vllms_arguments(context, seed):
    outs, lses = draw_parts(2, (7, 3, 8), seed, empty=0.5)
    expected = expected_with_context(outs, lses, 7 if context is None else context)
    prefix_lse, suffix_lse = lses.transpose(1, 2).contiguous().unbind(0)
    output = torch.full((7, 5, 8), math.nan)[:, :3]
    output_lse = torch.full((3, 9), math.nan)[:, :7]
    merge_attn_states(output, outs[0], prefix_lse, outs[1], suffix_lse, output_lse, context)
    assert_close(output, expected[0], EXACT, "out")
    assert_close(output_lse.T, expected[1], compare.FLOAT32, "lse")

    merge_attn_states(output, outs[0], prefix_lse, outs[1], suffix_lse)
    assert_close(output, oracles.merge_states(outs, lses)[0], EXACT, "out")


OUTS, LSES = [torch.zeros(3, 4, 8) for _ in range(2)], [torch.zeros(3, 4) for _ in range(2)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"context_tokens": -1}, ValueError, "^context_tokens must be at least 0, got -1$"),
        ({"context_tokens": 1.0}, TypeError, "^context_tokens must be an int, got float$"),
        ({"context_tokens": torch.ones(1)}, TypeError, "^context_tokens must be an int or an int32 or int64 tensor"),
        (
            {"context_tokens": torch.tensor([1, 2])},
            ValueError,
            "^context_tokens must have one element on cpu",
        ),
        ({"out_scale": 0.0}, ValueError, "^out_scale must be a finite number above 0, got 0.0$"),
        ({"out_scale": torch.ones(2)}, ValueError, r"^out_scale must have one element, got shape \[2\]$"),
        ({"out_scale": 1.0, "out": OUTS[0]}, TypeError, "^out must be float8_e4m3fn, got float32$"),
        ({"out": OUTS[0].to(torch.float8_e4m3fn)}, TypeError, "^out must be float32, got float8_e4m3fn$"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        merge_states(**({"outs": OUTS, "lses": LSES} | change))


def test_a_context_needs_an_axis_of_tokens():
    with pytest.raises(ValueError, match=r"^context_tokens must be None"):
        merge_states(torch.zeros(2, 8), torch.zeros(2), context_tokens=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prefix_output": [1]}, TypeError, "^prefix_output must be a tensor, got list$"),
        ({"suffix_output": None}, TypeError, "^suffix_output must be a tensor, got NoneType$"),
        ({"suffix_output": OUTS[0][:2]}, ValueError, r"^suffix_output must have shape \[3, 4, 8\]"),
        ({"prefix_lse": LSES[0]}, ValueError, r"^prefix_lse must have shape \[4, 3\] .* got \[3, 4\]$"),
        ({"suffix_lse": LSES[0].T.half()}, TypeError, "^suffix_lse must be float32, got float16$"),
        ({"output_lse": LSES[0]}, ValueError, r"^output_lse must have shape \[4, 3\]"),
        ({"output": OUTS[0].half()}, TypeError, "^output must be float32, got float16$"),
        ({"output_scale": "1"}, TypeError, "^output_scale must be a number, got str$"),
        ({"prefill_tokens_with_context": -1}, ValueError, "^prefill_tokens_with_context must be at least 0, got -1$"),
    ],
)
def test_errors_use_vllms_names(change, error, message):
    arguments = {
        "output": OUTS[0],
        "prefix_output": OUTS[0],
        "prefix_lse": LSES[0].T,
        "suffix_output": OUTS[1],
        "suffix_lse": LSES[1].T,
    }
    with pytest.raises(error, match=message):
        merge_attn_states(**(arguments | change))


def test_gradients_flow_through_the_last_part_alone_behind_the_context():
    outs, lses = draw_parts(2, (4, 2, 8), 0, empty=0.0)
    outs.requires_grad_()
    out, _ = merge_states(outs, lses, context_tokens=3)
    out.sum().backward()
    assert outs.grad is not None
    assert outs.grad[0, 3:].eq(0).all()
    assert outs.grad[1, 3:].eq(1).all()
    assert outs.grad[0, :3].gt(0).all()
