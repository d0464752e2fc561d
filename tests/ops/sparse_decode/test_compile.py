"""What the compiler makes of sparse decode's Triton kernel, for GPUs that are not here."""

from __future__ import annotations

import random

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

from flashlatte import kv_cache
from flashlatte.ops.sparse_decode.portable import launch
from flashlatte.runtime import dispatch, machine
from flashlatte.split_kv import combine

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

CLASSES = {80: "ampere", 86: "small", 89: "small", 90: "hopper", 100: "blackwell", 120: "small"}


@pytest.fixture
def record(monkeypatch):
    """The launches that a GPU of a compute capability would get, without the GPU."""
    recorders = Recorder(launch.sparse_decode_kernel), Recorder(combine.combine_kernel)
    monkeypatch.setattr(launch, "sparse_decode_kernel", recorders[0])
    monkeypatch.setattr(combine, "combine_kernel", recorders[1])
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def call(
        arch: int | None = 90,
        cache_format: str = "v32",
        batch: int = 128,
        s_q: int = 2,
        h_q: int = 128,
        topk: int = 2048,
        extra_topk: int = 0,
        head_dim: int = 576,
        head_dim_v: int = 512,
        page_size: int = 64,
        num_pages: int = 4,
        page_gap: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        lengths: bool = True,
    ) -> Launch:
        monkeypatch.setattr(launch, "gpu_class", lambda _: "other" if arch is None else CLASSES[arch])
        layout = kv_cache.get_format(cache_format, None if cache_format in ("v32", "model1") else head_dim)
        width = layout.record_width
        stride = page_size * width + page_gap
        storage = torch.empty(num_pages * stride, dtype=layout.record_dtype)
        cache = storage.as_strided((num_pages, page_size, 1, width), (stride, width, width, 1))
        length = torch.empty(batch, dtype=torch.int32) if lengths else None
        has_extra = extra_topk > 0
        for recorder in recorders:
            recorder.launches.clear()
        launch.sparse_decode(
            torch.empty(batch, s_q, h_q, layout.head_dim, dtype=dtype),
            cache,
            torch.empty(batch, s_q, topk, dtype=torch.int32),
            layout,
            length,
            torch.empty(h_q),
            cache if has_extra else None,
            torch.empty(batch, s_q, extra_topk, dtype=torch.int32) if has_extra else None,
            length if has_extra else None,
            0.1,
            float("-inf"),
            torch.empty(batch, s_q, h_q, head_dim_v, dtype=dtype),
            torch.empty(batch, s_q, h_q).transpose(1, 2),
        )
        return recorders[0].launches[0]

    call.fn = recorders[0].fn
    call.merge = recorders[1]
    return call


def compiled_for(record, arch: int, **call) -> Compiled:
    return compile_launch(record.fn, record(arch, **call), arch)


@pytest.mark.parametrize("extra_topk", [0, 1024])
@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
def test_64_heads_on_hopper(record, cache_format, extra_topk):
    compiled = compiled_for(record, 90, cache_format=cache_format, extra_topk=extra_topk)
    assert compiled.shared <= SHARED_BYTES[90], compiled
    assert compiled.hmma == 0, compiled
    # A packed tile waits in registers, of which it leaves few.
    assert loop_spills(compiled.sass) <= (8 if cache_format == "bf16" else 120), compiled
    # Every product with a tile of keys is done once, not by each warp group.
    products = (512 if cache_format == "model1" else 576) // 16
    products += 4 + (16 if cache_format == "bf16" else 4)
    assert compiled.hgmma <= products * (2 if extra_topk else 1), compiled
    if cache_format == "bf16":
        assert set(_pending(compiled)) == {"0"}


def _pending(compiled: Compiled) -> list[str]:
    return [line.split("pendings = ")[1][0] for line in compiled.ttgir.splitlines() if "pendings = " in line]


@pytest.mark.parametrize("cache_format", ["v32", "model1"])
def test_numbers_are_unpacked_in_pairs_and_once(record, cache_format):
    sass = compiled_for(record, 90, cache_format=cache_format, lengths=False).sass
    # 64 · 512 numbers of a tile by 256 threads, two by two, at most two products and one multiply-add each.
    pairs = 64 * 512 // 256 // 2
    assert pairs <= sass.count("HFMA2.BF16") <= pairs + 8
    assert pairs <= sass.count("HMUL2.BF16") <= 2 * pairs + 40
    assert sass.count("LDG.E.128") >= 8


@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
@pytest.mark.parametrize("h_q", [8, 32])
def test_few_heads_on_hopper(record, h_q, cache_format):
    compiled = compiled_for(record, 90, h_q=h_q, cache_format=cache_format)
    assert compiled.shared <= SHARED_BYTES[90], compiled
    assert loop_spills(compiled.sass) == 0, compiled
    assert compiled.hmma > 0, compiled


@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
def test_fits_amd(record, cache_format):
    assert amd_shared_bytes(record.fn, record(None, cache_format, h_q=32)) <= AMD_SHARED_BYTES


@pytest.mark.parametrize("cache_format", ["v32", "model1", "bf16"])
@pytest.mark.parametrize(("arch", "h_q"), [(80, 16), (80, 32), (80, 128), (86, 128), (100, 128), (120, 16)])
def test_fits_other_gpus(record, arch, h_q, cache_format):
    compiled = compiled_for(record, arch, h_q=h_q, cache_format=cache_format)
    assert compiled.shared <= SHARED_BYTES[arch], compiled
    assert compiled.hmma > 0, compiled


@pytest.mark.parametrize(
    "call",
    [
        {"cache_format": "bf16", "head_dim": 1024, "head_dim_v": 1024, "h_q": 64},
        {"cache_format": "bf16", "head_dim": 576, "head_dim_v": 576},
        {"cache_format": "fp16", "head_dim": 48, "head_dim_v": 32, "page_size": 1, "dtype": torch.float16},
        {"cache_format": "v32", "dtype": torch.float16},
        {"cache_format": "v32", "page_gap": 1},
        {"cache_format": "model1", "page_gap": 4, "page_size": 61},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [86, 90])
def test_unusual_caches_fit(record, arch, call):
    compiled = compiled_for(record, arch, **call)
    assert compiled.shared <= SHARED_BYTES[arch], compiled


@pytest.mark.parametrize("cache_format", ["v32", "bf16"])
def test_new_batches_lengths_and_caches_compile_nothing(record, cache_format):
    rng = random.Random(0)
    keys: list[set[str]] = [set(), set()]
    for _ in range(20):
        one = record(
            90,
            cache_format,
            batch=rng.randint(1, 200),
            s_q=rng.randint(1, 4),
            topk=rng.randint(200, 4000),
            num_pages=rng.randint(2, 9),
        )
        keys[0].add(variant_key(record.fn, one))
        keys[1].update(variant_key(record.merge.fn, merge) for merge in record.merge.launches)
    assert len(keys[0]) == 1
    assert len(keys[1]) <= 6


def test_scratch_is_bounded(record):
    for batch in (1, 5, 128, 1000, 20_000):
        scratch = record(90, batch=batch, topk=64).arguments["scratch"]
        assert scratch is None or scratch.nbytes <= 64 << 20


def test_few_items_are_split_and_many_are_not(record):
    assert record(90, batch=1, s_q=1).grid[0] > 60
    assert record(90, batch=1, s_q=1, lengths=False).grid[0] > 60
    assert record(90, batch=128, s_q=2, lengths=False).grid == (512,)
    assert not record.merge.launches


def test_slots_beyond_int32(record):
    one = record(90)
    assert one.arguments["num_slots"] == 4 * 64
    assert not one.arguments["PLACE"].wide
