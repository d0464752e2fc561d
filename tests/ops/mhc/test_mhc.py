"""Hyper-connections compared with float64, in both implementations, and with transformers' module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte.ops.mhc import api, mhc_post, mhc_pre
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def arguments(tokens, count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randn(tokens, count, width, generator=generator).to(dtype)
    numbers = (2 + count) * count
    projected = 8 * torch.randn(tokens, numbers, generator=generator)
    return streams, projected, torch.randn(numbers, generator=generator), torch.randn(3, generator=generator)


def exact(streams, projected, base, scale, rms_eps, eps, iterations):
    """The result in float64, token by token."""
    count = streams.shape[1]
    found = []
    for x, z in zip(streams.double(), projected.double(), strict=True):
        z = z / (x.square().mean() + rms_eps).sqrt()
        factor = torch.cat([s.expand(n) for s, n in zip(scale.double(), (count, count, count**2), strict=True)])
        z = z * factor + base.double()
        mixture = torch.softmax(z[2 * count :].view(count, count), dim=1) + eps
        mixture = mixture / (mixture.sum(0) + eps)
        for _ in range(iterations - 1):
            mixture = mixture / (mixture.sum(1, keepdim=True) + eps)
            mixture = mixture / (mixture.sum(0) + eps)
        weights = torch.sigmoid(z[:count]) + eps
        found.append((2 * torch.sigmoid(z[count : 2 * count]), mixture, weights @ x))
    shapes = (0, count), (0, count, count), (0, streams.shape[2])
    return [torch.stack(part) for part in zip(*found, strict=True)] or [torch.zeros(s).double() for s in shapes]


@given(
    tokens=st.integers(0, 3),
    count=st.sampled_from([1, 2, 3, 4, 5, 16]),
    width=st.sampled_from([1, 24, 130, 1024, 1500]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    rms_eps=st.sampled_from([1e-6, 0.5]),
    eps=st.sampled_from([1e-6, 0.01]),
    iterations=st.sampled_from([1, 2, 20]),
    seed=st.integers(0, 9),
)
def test_against_float64(tokens, count, width, dtype, rms_eps, eps, iterations, seed):
    given_to = arguments(tokens, count, width, dtype, seed)
    streams = given_to[0]
    shares, mixture, seen = mhc_pre(*given_to, rms_eps=rms_eps, eps=eps, iterations=iterations, backend=BACKEND)
    assert (shares.dtype, mixture.dtype, seen.dtype) == (torch.float32, torch.float32, dtype)
    expected = exact(*given_to, rms_eps, eps, iterations)
    torch.testing.assert_close(shares.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixture.double(), expected[1], rtol=1e-3, atol=1e-5)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(seen.double(), expected[2], rtol=rounding + 1e-4, atol=1e-4)

    result = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    after = mhc_post(result, streams, shares, mixture, backend=BACKEND)
    assert after.dtype == dtype
    assert after.shape == streams.shape
    mixed = torch.einsum("tij,tid->tjd", mixture.double(), streams.double())
    mixed = mixed + shares.double().unsqueeze(2) * result.double().unsqueeze(1)
    torch.testing.assert_close(after.double(), mixed, rtol=rounding + 1e-6, atol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_a_nan_stays_in_its_token():
    streams, projected, base, scale = arguments(4, 4, 40, torch.float32, 0)
    clean = mhc_pre(streams, projected, base, scale, backend=BACKEND)
    streams[1, 2, 3], projected[3, 5] = torch.nan, torch.inf
    for before, after in zip(clean, mhc_pre(streams, projected, base, scale, backend=BACKEND), strict=True):
        assert after[[0, 2]].equal(before[[0, 2]])
    result = torch.zeros(4, 40)
    after = mhc_post(result, streams, clean[0], clean[1], backend=BACKEND)
    assert after.isnan().any(dim=2).any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_logits_are_finite():
    streams, projected, base, scale = arguments(2, 4, 16, torch.float32, 0)
    for value in mhc_pre(streams, projected * 1e4, base, scale, backend=BACKEND):
        assert value.isfinite().all()


def test_as_transformers_module():
    host = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    import transformers

    config = transformers.DeepseekV4Config(hidden_size=48)
    module = host.DeepseekV4HyperConnection(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    streams = torch.randn(5, 4, 48, generator=torch.Generator().manual_seed(2))
    projected = streams.flatten(1) @ module.fn.T
    made = mhc_pre(
        streams,
        projected,
        module.base,
        module.scale,
        rms_eps=config.rms_norm_eps,
        eps=config.hc_eps,
        iterations=config.hc_sinkhorn_iters,
        backend=BACKEND,
    )
    for actual, expected in zip(made, module(streams[None]), strict=True):
        torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-5)


STREAMS, PROJECTED, BASE, SCALE = torch.zeros(3, 4, 8), torch.zeros(3, 24), torch.zeros(24), torch.zeros(3)
RESULT, SHARES, MIXTURE = torch.zeros(3, 8), torch.zeros(3, 4), torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"streams": STREAMS.int()}, TypeError, "^streams must be bfloat16 or float16 or float32, got int32"),
        ({"streams": STREAMS[0]}, ValueError, r"^streams must have shape \[T, n, hidden_size\]"),
        ({"streams": torch.zeros(3, 8, 4).mT}, ValueError, "^streams must "),
        ({"streams": torch.zeros(3, 4, 16)[..., :8]}, ValueError, "^streams must be contiguous, got strides"),
        ({"streams": torch.zeros(3, 17, 8)}, ValueError, "^streams must have at most 16 streams per token, got 17$"),
        ({"projected": PROJECTED[:, :23]}, ValueError, r"^projected must have shape \[3, 24\]"),
        ({"projected": PROJECTED.half()}, TypeError, "^projected must be float32, got float16$"),
        ({"base": BASE[:4]}, ValueError, r"^base must have shape \[24\]"),
        ({"scale": SCALE.to("meta")}, ValueError, "^scale must be on cpu like the other arguments"),
        ({"eps": -1.0}, ValueError, "^eps must be a finite number of at least 0 in float32"),
        ({"rms_eps": None}, TypeError, "^rms_eps must be a number"),
        ({"iterations": 0}, ValueError, "^iterations must be at least 1, got 0$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of mhc_pre: it "),
    ],
)
def test_errors_of_pre_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        mhc_pre(**({"streams": STREAMS, "projected": PROJECTED, "base": BASE, "scale": SCALE} | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"result": RESULT.half()}, TypeError, "^result must be float32, got float16$"),
        ({"result": RESULT[:2]}, ValueError, r"^result must have shape \[3, 8\]"),
        ({"shares": SHARES[:, :3]}, ValueError, r"^shares must have shape \[3, 4\]"),
        ({"mixture": MIXTURE.bfloat16()}, TypeError, "^mixture must be float32, got bfloat16$"),
        ({"mixture": MIXTURE.mT.contiguous().mT}, ValueError, "^mixture must "),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of mhc_post: it "),
    ],
)
def test_errors_of_post_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        mhc_post(**({"result": RESULT, "streams": STREAMS, "shares": SHARES, "mixture": MIXTURE} | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "mhc_pre", lambda: mhc_pre(STREAMS, PROJECTED, BASE, SCALE))
    opcheck(api, "mhc_post", lambda: mhc_post(RESULT, STREAMS, SHARES, MIXTURE))
