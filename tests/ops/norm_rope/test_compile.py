"""The layer's elementwise kernels as machine code of GPUs that need not be there."""

import importlib

import pytest
import torch
from support.compile import Recorder, compile_launch, variant_key

from flashlatte import kv_cache
from flashlatte.runtime import dispatch

PORTABLE = importlib.import_module("flashlatte.ops.norm_rope.portable")

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="kernels are interpreted, not compiled")


@pytest.fixture
def recorders(monkeypatch):
    found = [Recorder(getattr(PORTABLE, name)) for name in ("latent_rows_kernel", "rotate_heads_kernel")]
    for name, recorder in zip(("latent_rows_kernel", "rotate_heads_kernel"), found, strict=True):
        monkeypatch.setattr(PORTABLE, name, recorder)
    return found


def run(tokens=8, heads=128, positions=100, pages=3, page_size=64, interleaved=True, with_cache=True):
    dtype = torch.bfloat16
    kv_a, q_a = torch.zeros(tokens, 576, dtype=dtype), torch.zeros(tokens, 1536, dtype=dtype)
    table = torch.zeros(positions, 64)
    where = torch.zeros(tokens, dtype=torch.int64)
    cache = kv_cache.allocate("bf16", pages, page_size) if with_cache else None
    PORTABLE.latent_rows(
        kv_a,
        torch.zeros(512, dtype=dtype),
        1e-6,
        table,
        where,
        interleaved,
        q_a,
        torch.zeros(1536, dtype=dtype),
        1e-6,
        where if with_cache else None,
        torch.empty_like(kv_a),
        torch.empty_like(q_a),
        cache,
    )
    query, folded = torch.zeros(tokens, heads, 192, dtype=dtype), torch.zeros(tokens, heads, 576, dtype=dtype)
    PORTABLE.rotate_heads(query[..., 128:], table, where, interleaved, folded[..., 512:])


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("with_cache", [True, False])
def test_no_spills(recorders, arch, interleaved, with_cache):
    run(interleaved=interleaved, with_cache=with_cache)
    for recorder in recorders:
        ((launch),) = recorder.launches
        compiled = compile_launch(recorder.fn, launch, arch)
        assert compiled.spills == 0
        assert compiled.registers <= 64


def test_new_sizes_compile_nothing(recorders):
    for size in range(1, 21):
        run(tokens=size, heads=size, positions=size, pages=size, page_size=16 * size)
    for recorder in recorders:
        assert len({variant_key(recorder.fn, launch) for launch in recorder.launches}) == 1
