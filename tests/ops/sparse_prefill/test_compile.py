"""What the compiler makes of sparse prefill's Triton kernel, for GPUs that are not here."""

from __future__ import annotations

import random
import re

import pytest
import torch
from support.compile import (
    AMD_SHARED_BYTES,
    SHARED_BYTES,
    Compiled,
    Launch,
    Recorder,
    amd_shared_bytes,
    compile_launch,
    loop_spills,
    variant_key,
)

from flashlatte.ops.sparse_prefill import portable
from flashlatte.runtime import dispatch

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

CLASSES = {80: "ampere", 86: "small", 89: "small", 90: "hopper", 100: "blackwell", 120: "small"}


@pytest.fixture
def launch(monkeypatch):
    """The launch that a GPU of a compute capability would get, without the GPU."""
    recorder = Recorder(portable.sparse_prefill_kernel)
    monkeypatch.setattr(portable, "sparse_prefill_kernel", recorder)

    def record(
        arch: int | None = 90,
        s_q: int = 64,
        h_q: int = 128,
        topk: int = 2048,
        s_kv: int = 100,
        head_dim: int = 576,
        d_v: int = 512,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Launch:
        monkeypatch.setattr(portable, "gpu_class", lambda _: "other" if arch is None else CLASSES[arch])
        recorder.launches.clear()
        portable.sparse_prefill(
            torch.empty(s_q, h_q, head_dim, dtype=dtype),
            torch.empty(s_kv, 1, head_dim, dtype=dtype),
            torch.empty(s_q, 1, topk, dtype=torch.int32),
            torch.empty(s_q, dtype=torch.int32),
            torch.empty(h_q),
            0.1,
            float("-inf"),
            torch.empty(s_q, h_q, d_v, dtype=dtype),
            torch.empty(s_q, h_q),
            torch.empty(s_q, h_q),
        )
        return recorder.launches[0]

    record.fn = recorder.fn
    return record


def compiled_for(launch, arch: int, **call) -> Compiled:
    return compile_launch(launch.fn, launch(arch, **call), arch)


@pytest.mark.parametrize("head_dim", [576, 512])
def test_64_heads_on_hopper(launch, head_dim):
    compiled = compiled_for(launch, 90, head_dim=head_dim)
    assert compiled.shared <= SHARED_BYTES[90], compiled
    assert loop_spills(compiled.sass) <= 8, compiled
    assert compiled.hmma == 0, compiled
    # Each warp group multiplies the queries with half of the keys, once.
    assert len(re.findall(r"HGMMA\.64x32x16", compiled.sass)) <= head_dim // 16 + 4, compiled
    assert re.findall(r"HGMMA\.64x64x16", compiled.sass), compiled
    assert compiled.async_copies >= 64 * head_dim // 8 // 256, compiled


def test_a_tile_is_not_loaded_again_while_it_is_multiplied(launch):
    """Two buffers of tiles are enough as long as every product in the loop is waited for where it stands."""
    compiled = compiled_for(launch, 90)
    assert "memdesc<2x64x512xbf16" in compiled.ttgir
    assert set(re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", compiled.ttgir)) == {"0"}


def test_fits_amd(launch):
    assert amd_shared_bytes(launch.fn, launch(None, h_q=32)) <= AMD_SHARED_BYTES


@pytest.mark.parametrize("h_q", [8, 16, 32])
def test_few_heads_on_hopper(launch, h_q):
    compiled = compiled_for(launch, 90, h_q=h_q)
    assert compiled.shared <= SHARED_BYTES[90] // (2 if h_q <= 16 else 1), compiled
    assert compiled.spills == 0, compiled
    assert compiled.hmma > 0, compiled
    assert compiled.async_copies > 0, compiled


@pytest.mark.parametrize("h_q", [16, 32, 128])
@pytest.mark.parametrize("arch", [80, 86, 100])
def test_fits_other_gpus(launch, arch, h_q):
    compiled = compiled_for(launch, arch, h_q=h_q)
    assert compiled.shared <= SHARED_BYTES[arch], compiled
    assert loop_spills(compiled.sass) == 0, compiled
    assert compiled.async_copies > 0, compiled


@pytest.mark.parametrize(
    "call",
    [
        {"head_dim": 1024, "d_v": 1024, "h_q": 64},
        {"head_dim": 1024, "d_v": 520},
        {"head_dim": 576, "d_v": 576},
        {"head_dim": 48, "d_v": 32, "dtype": torch.float16},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [86, 90])
def test_unusual_rows_fit(launch, arch, call):
    compiled = compiled_for(launch, arch, **call)
    assert compiled.shared <= SHARED_BYTES[arch], compiled


def test_new_lengths_and_batches_compile_nothing(launch):
    rng = random.Random(0)
    recorded = [
        launch(s_q=rng.randint(1, 200), topk=rng.randint(1, 4000), s_kv=rng.randint(1, 9000)) for _ in range(20)
    ]
    assert len({variant_key(launch.fn, one) for one in recorded}) == 1


def test_grid_is_one_dimensional(launch):
    assert launch(s_q=70_000, h_q=128, topk=1).grid == (140_000,)
