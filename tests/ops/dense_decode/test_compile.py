"""What the compiler makes of dense decode's Triton kernels, for GPUs that are not here."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from support.compile import (
    AMD_SHARED_BYTES,
    SHARED_BYTES,
    Recorder,
    amd_shared_bytes,
    compile_launch,
    loop_spills,
    variant_key,
)

from flashlatte.ops.dense_decode.portable import launch
from flashlatte.runtime import dispatch, machine
from flashlatte.split_kv import combine

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

CLASSES = {80: "ampere", 86: "small", 89: "small", 90: "hopper", 100: "blackwell", 120: "small"}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def recorded(monkeypatch):
    """Launches of the two kernels, as a GPU of a compute capability would get them, without the GPU."""
    recorders = Recorder(launch.dense_decode_kernel), Recorder(combine.combine_kernel)
    monkeypatch.setattr(launch, "dense_decode_kernel", recorders[0])
    monkeypatch.setattr(combine, "combine_kernel", recorders[1])
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(arch: int | None = 90, **call: Any) -> tuple[Recorder, Recorder]:
        monkeypatch.setattr(launch, "gpu_class", lambda _: "other" if arch is None else CLASSES[arch])
        monkeypatch.setattr(launch, "converts_e4m3", lambda _: arch is not None and arch >= 89)
        for recorder in recorders:
            recorder.launches.clear()
        decode(**call)
        return recorders

    return record


def decode(
    batch: int = 4,
    s_q: int = 1,
    h_q: int = 16,
    h_kv: int = 1,
    head_dim: int = 576,
    head_dim_v: int = 512,
    page_size: int = 64,
    max_pages: int = 64,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = BF16,
    batch_invariant: bool = False,
) -> None:
    """A call of the portable implementation with tensors whose contents do not matter."""
    launch.dense_decode(
        torch.empty(batch, s_q, h_q, head_dim, dtype=dtype),
        torch.empty(2, page_size, h_kv, head_dim, dtype=cache_dtype),
        torch.empty(batch, max_pages, dtype=torch.int32),
        torch.empty(batch, dtype=torch.int32),
        None,
        1.0,
        0.1,
        True,
        float("-inf"),
        batch_invariant,
        torch.empty(batch, s_q, h_q, head_dim_v, dtype=dtype),
        torch.empty(batch, s_q, h_q).transpose(1, 2),
    )


@pytest.mark.parametrize("cache_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("h_q", [16, 32, 128])
def test_main_loop_on_hopper(recorded, h_q, cache_dtype):
    kernel, _ = recorded(90, h_q=h_q, cache_dtype=cache_dtype)
    compiled = compile_launch(kernel.fn, kernel.launches[0], 90)
    assert compiled.shared <= SHARED_BYTES[90], compiled
    of_warp_groups = h_q > (16 if cache_dtype == FP8 else 32)
    assert (compiled.hgmma if of_warp_groups else compiled.hmma) > 0, compiled
    assert compiled.async_copies > 0, compiled
    assert loop_spills(compiled.sass) == 0, compiled


def test_no_score_is_computed_twice_on_hopper(recorded):
    kernel, _ = recorded(90, h_q=128)
    compiled = compile_launch(kernel.fn, kernel.launches[0], 90)
    # Four warps multiply half of the keys with 576 numbers, 16 at a time, and half of the values with the weights of
    # 64 keys, 64 values and 16 keys at a time.
    assert compiled.hgmma == 576 // 16 + (256 // 64) * (64 // 16), compiled


def test_a_tile_is_not_loaded_again_while_it_is_multiplied(recorded):
    """Two buffers of tiles are enough as long as every product in the loop is waited for where it stands."""
    kernel, _ = recorded(90, h_q=128)
    compiled = compile_launch(kernel.fn, kernel.launches[0], 90)
    assert "memdesc<2x64x512xbf16" in compiled.ttgir
    lines = compiled.ttgir.splitlines()
    followers = [after for line, after in itertools.pairwise(lines) if "isAsync = true" in line]
    assert followers
    for follower in followers:
        assert "warp_group_dot_wait" in follower, follower
        assert "pendings = 0" in follower, follower


@pytest.mark.parametrize("cache_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_fits_amd(recorded, cache_dtype):
    kernel, _ = recorded(None, h_q=32, cache_dtype=cache_dtype)
    assert amd_shared_bytes(kernel.fn, kernel.launches[0]) <= AMD_SHARED_BYTES


@pytest.mark.parametrize(
    ("arch", "h_q", "cache_dtype"),
    [
        (80, 16, BF16),
        (80, 32, BF16),
        (80, 128, BF16),
        (80, 128, FP8),
        (86, 16, BF16),
        (86, 128, BF16),
        (89, 16, FP8),
        (100, 128, BF16),
        (100, 16, FP8),
        (120, 128, BF16),
    ],
)
def test_fits_other_gpus(recorded, arch, h_q, cache_dtype):
    kernel, _ = recorded(arch, h_q=h_q, cache_dtype=cache_dtype)
    compiled = compile_launch(kernel.fn, kernel.launches[0], arch)
    assert compiled.shared <= SHARED_BYTES[arch], compiled
    assert compiled.hmma > 0, compiled
    assert compiled.async_copies > 0, compiled


@pytest.mark.parametrize(
    "call",
    [
        {"head_dim": 1024, "head_dim_v": 1024, "h_q": 64},
        {"head_dim": 1024, "head_dim_v": 520},
        {"head_dim": 80, "head_dim_v": 80, "h_q": 100},
        {"head_dim": 48, "head_dim_v": 32, "page_size": 1, "h_kv": 2, "dtype": torch.float16, "cache_dtype": FP8},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [86, 90])
def test_unusual_rows_fit(recorded, arch, call):
    kernel, _ = recorded(arch, **call)
    compiled = compile_launch(kernel.fn, kernel.launches[0], arch)
    assert compiled.shared <= SHARED_BYTES[arch], compiled


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("batch", [1, 64])
def test_combine(recorded, batch, batch_invariant):
    _, kernel = recorded(90, batch=batch, h_q=128, batch_invariant=batch_invariant)
    compiled = compile_launch(kernel.fn, kernel.launches[0], 90)
    assert compiled.spills == 0, compiled
    # Three programs an SM, or four (128) with Triton 3.6.
    assert compiled.registers <= 168, compiled


@pytest.mark.parametrize("h_q", [16, 128])
def test_new_batches_lengths_and_strides_compile_nothing(recorded, h_q):
    rng = random.Random(0)
    keys: list[set[str]] = [set(), set()]
    for _ in range(20):
        call = {"batch": rng.randint(1, 200), "s_q": rng.randint(5, 8), "max_pages": rng.randint(1, 3000)}
        for recorder, seen in zip(recorded(90, h_q=h_q, **call), keys, strict=True):
            seen.update(variant_key(recorder.fn, one) for one in recorder.launches)
    assert len(keys[0]) == 1
    assert len(keys[1]) <= 4  # tiles by the splits of an item, and that of the boundaries of parts


@pytest.mark.parametrize("h_q", [16, 128])
def test_batch_invariant_is_the_same_machine_code_for_all_batches_and_tables(recorded, h_q):
    """Two variants of one kernel may round differently: the compiler joins products and sums as it sees fit."""
    keys: list[set[str]] = [set(), set()]
    for batch, max_pages in ((1, 1), (3, 5), (3, 45), (200, 63), (7, 3000)):
        call = recorded(90, batch=batch, h_q=h_q, max_pages=max_pages, batch_invariant=True)
        for recorder, seen in zip(call, keys, strict=True):
            seen.update(variant_key(recorder.fn, one) for one in recorder.launches)
    assert [len(seen) for seen in keys] == [1, 1]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scratch_is_bounded(recorded, batch_invariant):
    for batch in (1, 5, 128, 1000):
        kernel, _ = recorded(90, batch=batch, h_q=128, max_pages=2048, batch_invariant=batch_invariant)
        for one in kernel.launches:
            assert one.arguments["scratch"].nbytes <= 64 << 20


def test_grids_cover_every_program(recorded):
    kernel, merge = recorded(90, batch=100, s_q=2, h_q=128, max_pages=2048, batch_invariant=True)
    requests = sum(
        one.grid[0] // (one.arguments["num_groups"] * one.arguments["num_splits"]) for one in kernel.launches
    )
    assert requests == 100
    assert len(kernel.launches) == len(merge.launches) > 1
