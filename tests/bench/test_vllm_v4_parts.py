"""Stand-ins for parts of vLLM's DeepSeek-V4 in ``flashlatte bench vllm-steps``, called with vLLM's arguments."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

from flashlatte.bench.serving import vllm_v4_parts as parts

TOKENS, STREAMS, WIDTH, ITERATIONS = 3, 4, 64, 20
RMS_EPS, EPS, NORM_EPS = 1e-6, 1e-6, 1e-5
NUMBERS = (RMS_EPS, EPS, EPS, 2.0, ITERATIONS)


def draw(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


STATE = draw(TOKENS, STREAMS, WIDTH, seed=1, dtype=torch.bfloat16)
# The projection, its scales of 0.5, 1 and 1.5 and its base, as parameters of a layer.
LAYER = (
    draw((2 + STREAMS) * STREAMS, STREAMS * WIDTH, seed=2) / 16,
    torch.tensor([0.5, 1.0, 1.5]),
    draw((2 + STREAMS) * STREAMS, seed=3),
)
NORM = draw(WIDTH, seed=4, dtype=torch.bfloat16)


def gates(streams, fn):
    """The logits of a token's streams before their scale, in float64."""
    flat = streams.double().flatten(1)
    return flat @ fn.double().T * (flat.square().mean(1, keepdim=True) + RMS_EPS).rsqrt()


def expected_pre(streams):
    fn, scale, base = LAYER
    logits = gates(streams, fn)
    bounds = [STREAMS, 2 * STREAMS]
    parts_of = zip(logits.tensor_split(bounds, 1), scale.double(), base.double().tensor_split(bounds), strict=True)
    pre, post, mixture = (part * factor + bias for part, factor, bias in parts_of)
    mixture = mixture.view(-1, STREAMS, STREAMS).softmax(-1) + EPS
    mixture = mixture / (mixture.sum(1, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        mixture = mixture / (mixture.sum(2, keepdim=True) + EPS)
        mixture = mixture / (mixture.sum(1, keepdim=True) + EPS)
    x = ((pre.sigmoid() + EPS).unsqueeze(-1) * streams.double()).sum(1)
    normed = x * (x.square().mean(1, keepdim=True) + NORM_EPS).rsqrt() * NORM.double()
    return 2 * post.sigmoid().unsqueeze(-1), mixture, normed


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, atol=3e-2 if one.dtype == torch.bfloat16 else 1e-4)


def test_the_input_of_a_layer():
    close(parts.mhc_pre_tilelang(STATE, *LAYER, *NUMBERS, norm_weight=NORM, norm_eps=NORM_EPS), expected_pre(STATE))


def test_the_first_layer_has_equal_streams():
    x, fn = STATE[:, 0], LAYER[0]
    summed = fn.unflatten(1, (STREAMS, WIDTH)).sum(1)
    streams, *others = parts.mhc_pre_broadcast_tilelang(
        x, *LAYER, *NUMBERS, norm_weight=NORM, norm_eps=NORM_EPS, fn_broadcast=summed
    )
    assert torch.equal(streams, x.unsqueeze(1).expand_as(STATE))
    close(others, expected_pre(streams))


def test_between_two_layers():
    result = draw(TOKENS, WIDTH, seed=5, dtype=torch.bfloat16)
    shares, mixture, _ = parts.mhc_pre_tilelang(STATE, *LAYER, *NUMBERS)
    streams, *others = parts.mhc_fused_post_pre_tilelang(
        result, STATE, shares, mixture, *LAYER, *NUMBERS, n_splits=1, tile_n=1, norm_weight=NORM, norm_eps=NORM_EPS
    )
    mixed = torch.einsum(
        "tij,tih->tjh", mixture.double(), STATE.double()
    ) + shares.double() * result.double().unsqueeze(1)
    close([streams], [mixed])
    assert torch.equal(streams, parts.mhc_post_tilelang(result, STATE, shares, mixture))
    close(others, expected_pre(streams))


def test_the_sum_of_the_streams():
    fn, scale, base = LAYER[0][:STREAMS], torch.tensor([0.7]), draw(STREAMS, seed=6)
    weights = (gates(STATE, fn) * scale.double() + base.double()).sigmoid() + EPS
    expected = (weights.unsqueeze(-1) * STATE.double()).sum(1)
    close([parts.hc_head_fused_kernel_tilelang(STATE, fn, scale, base, RMS_EPS, EPS)], [expected])


def test_other_constants_are_refused():
    for numbers in ((RMS_EPS, EPS, 1e-3, 2.0, ITERATIONS), (RMS_EPS, EPS, EPS, 1.0, ITERATIONS)):
        with pytest.raises(NotImplementedError, match="one eps"):
            parts.mhc_pre_tilelang(STATE, *LAYER, *numbers)


def test_the_compressor_writes_packed_rows_only():
    options = {"store_full_fp8": False, "fp8_scale": None}
    with pytest.raises(NotImplementedError, match="fp8_ds_mla"):
        parts.compress(store_full_kv=True, **options)


def test_large_groups_are_compressed_with_more_warps(monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, num_warps, COMPRESS_RATIO: launched.append((grid, COMPRESS_RATIO, num_warps))

    module: Any = types.ModuleType(parts.TRITON_COMPRESSOR)
    setattr(module, parts.TRITON_KERNEL, Kernel())

    def store(compress_ratio):
        getattr(module, parts.TRITON_KERNEL)[(7,)]("state", COMPRESS_RATIO=compress_ratio, num_warps=4)

    module.compress_norm_rope_store_triton = store
    monkeypatch.setitem(sys.modules, parts.TRITON_COMPRESSOR, module)
    for ratio in (4, 128, 4):
        parts.compress(store_full_kv=False, store_full_fp8=False, fp8_scale=None, compress_ratio=ratio)
    assert launched == [((7,), 4, 4), ((7,), 128, 16), ((7,), 4, 4)]


@pytest.fixture
def modules(monkeypatch):
    """vLLM's module of hyper-connections, and which packages are installed."""
    mhc, found = types.ModuleType(parts.MHC), set()
    monkeypatch.setitem(sys.modules, parts.MHC, mhc)
    monkeypatch.delitem(sys.modules, parts.COMPRESSOR, raising=False)
    monkeypatch.setattr(parts.importlib, "import_module", lambda name: sys.modules[name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    yield mhc, found
    sys.modules.pop(parts.COMPRESSOR, None)


def test_missing_packages_have_stand_ins(modules):
    mhc, found = modules
    found.add("tilelang")
    assert parts.replace_missing_parts() == {"compressor": "vllm_triton"}
    assert sys.modules[parts.COMPRESSOR]._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL is parts.compress
    assert not hasattr(mhc, "mhc_pre_tilelang")
    found.add("cutlass")
    assert parts.replace_missing_parts() == {}


def test_a_variable_replaces_parts(modules, monkeypatch):
    mhc, found = modules
    found |= {"tilelang", "cutlass"}
    monkeypatch.setenv(parts.VARIABLE, "mhc")
    assert parts.replace_missing_parts() == {"mhc": "flashlatte"}
    assert mhc.mhc_pre_tilelang is parts.mhc_pre_tilelang
    monkeypatch.setenv(parts.VARIABLE, "moe")
    with pytest.raises(ValueError, match="must be some of mhc,compressor, got 'moe'"):
        parts.replace_missing_parts()
