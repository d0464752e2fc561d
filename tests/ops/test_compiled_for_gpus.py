"""Kernels of any GPU, compiled for several: each must fit its shared memory, and use its tensor cores."""

from __future__ import annotations

import pytest
import torch
from support.calls import FP8, FP16
from support.compile import AMD_SHARED_BYTES, SHARED_BYTES, amd_shared_bytes
from support.launches import launches, main_kernels
from support.recording import Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@pytest.fixture
def record(monkeypatch):
    return Recording(monkeypatch)


WIDE = {"heads": 64, "head_dim": 1024, "d_v": 1024}
OTHER_GPUS = [
    *(("dense_decode", arch, {"heads": heads}) for arch, heads in ((80, 16), (80, 128), (86, 16), (86, 128))),
    *(("dense_decode", arch, {"heads": 128}) for arch in (100, 120)),
    *(("dense_decode", arch, {"heads": 16, "cache_dtype": FP8}) for arch in (80, 89, 100)),
    *(("dense_decode", arch, WIDE) for arch in (86, 90)),
    *(("dense_decode", arch, {"head_dim": 1024, "d_v": 520}) for arch in (86, 90)),
    *(("dense_decode", arch, {"heads": 100, "head_dim": 80, "d_v": 80}) for arch in (86, 90)),
    *(
        ("sparse_decode", arch, {"form": form, "heads": heads})
        for form in ("v32", "model1", "v41_fp4", "bf16")
        for arch, heads in ((80, 16), (80, 32), (80, 128), (86, 128), (100, 128), (120, 16))
    ),
    *(("sparse_decode", arch, {"form": "bf16", **WIDE}) for arch in (86, 90)),
    *(("sparse_decode", arch, {"form": "bf16", "d_v": 576}) for arch in (86, 90)),
    *(
        ("sparse_decode", arch, {"form": "fp16", "head_dim": 48, "d_v": 32, "page_size": 1, "dtype": FP16})
        for arch in (86, 90)
    ),
    *(("sparse_decode", arch, {"form": "v32", "dtype": FP16}) for arch in (86, 90)),
    *(("sparse_decode", arch, {"form": "v32", "page_gap": 1}) for arch in (86, 90)),
    *(("sparse_decode", arch, {"form": "model1", "page_gap": 4, "page_size": 61}) for arch in (86, 90)),
    *(("sparse_prefill", arch, {"heads": heads}) for arch in (80, 86, 100) for heads in (16, 32, 128)),
    *(("sparse_prefill", arch, WIDE) for arch in (86, 90)),
    *(
        ("sparse_attention_backward", arch, {"heads": heads, "head_dim": head_dim, "sinks": False})
        for arch in (80, 86, 90, 100, 120)
        for heads in (1, 16, 32, 128)
        for head_dim in (512, 576)
    ),
    *(("sparse_attention_backward", arch, {"head_dim": 48, "d_v": 32, "dtype": FP16}) for arch in (86, 90)),
    *(
        ("indexer_loss", arch, {"heads": heads, "index_heads": index_heads, "topk": topk})
        for arch in (80, 86, 90, 100, 120)
        for heads, index_heads in ((1, 1), (16, 16), (32, 32), (128, 64))
        for topk in (256, None)
    ),
    *(("indexer_loss", arch, {"use_relu": False}) for arch in (80, 90)),
    *(("indexer_loss", arch, {"head_dim": 48, "index_dim": 256, "dtype": FP16}) for arch in (86, 90, 100)),
    *(("sparse_prefill", arch, {"head_dim": 48, "d_v": 32, "dtype": FP16}) for arch in (86, 90)),
    *(("paged_attention", arch, {"tokens": tokens}) for arch in (80, 86, 100) for tokens in (2, 16, 2048)),
    *(
        ("paged_attention", arch, {"tokens": tokens, "head_dim": width, "d_v": width})
        for arch in (86, 90)
        for tokens in (2, 2048)
        for width in (80, 256, 512)
    ),
    *(
        ("paged_attention", arch, {"tokens": 2048, "cache_dtype": cache_dtype})
        for arch in (80, 89, 100)
        for cache_dtype in (FP8, torch.float8_e5m2, torch.int8)
    ),
    *((operation, arch, {}) for operation in ("dense_prefill", "dense_prefill_backward") for arch in (80, 86, 100)),
    *(
        (operation, arch, {"head_dim": 256, "d_v": 256})
        for operation in ("dense_prefill", "dense_prefill_backward")
        for arch in (86, 90, 100)
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("operation", "arch", "call"), OTHER_GPUS, ids=str)
def test_fits_every_gpu(record, operation, arch, call):
    found = main_kernels(launches(record, operation, "portable", arch=arch, **call))
    assert found
    for one in found:
        code = one.compile(arch)
        assert code.shared <= SHARED_BYTES[arch], code
        # A kernel that wants more tensor memory than there is becomes a trap, without products.
        assert code.hmma + code.hgmma > 0 or "UTCHMMA" in code.sass, code


@pytest.mark.full
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("dense_decode", {"heads": 32}),
        ("dense_decode", {"heads": 32, "cache_dtype": FP8}),
        *(("sparse_decode", {"form": form, "heads": 32}) for form in ("v32", "model1", "bf16")),
        ("sparse_prefill", {"heads": 32}),
    ],
    ids=str,
)
def test_fits_amd(record, operation, call):
    found = main_kernels(launches(record, operation, "portable", arch=None, **call))
    assert found
    assert all(amd_shared_bytes(one.kernel, one.launch) <= AMD_SHARED_BYTES for one in found)
