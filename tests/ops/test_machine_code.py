"""Machine code of every kernel, compiled for GPUs that need not be present.

A kernel must fit the GPU's shared memory, use tensor cores, and spill nothing in its main loop. Numbers of instructions
and bytes of shared memory are not tested.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.calls import BF16, FP8, FP16
from support.compile import SHARED_BYTES, loop_spills
from support.later_spills import allowed
from support.launches import launches, main_kernels
from support.recording import Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@pytest.fixture
def record(monkeypatch):
    return Recording(monkeypatch)


@dataclass(frozen=True)
class Variant:
    """A call, and what its kernels may cost.

    Attributes:
        arch: compute capability, 90 for 9.0.
        products: "hgmma" or "hmma", the tensor-core instructions that it must have, and no others; None for neither.
        spills: instructions in the main loop that spill; in a kernel without products, anywhere.
    """

    operation: str
    backend: str
    call: dict[str, Any] = field(default_factory=dict)
    arch: int = 90
    products: str | None = "hgmma"
    spills: int = 0

    def __str__(self) -> str:
        words = [f"{name} {getattr(value, '__name__', value)}" for name, value in self.call.items()]
        return ", ".join([f"{self.operation} {self.backend} {self.arch}", *words]).replace("torch.", "")


LENGTHS = {"extra_topk": 512, "lengths": True}
HOPPER = [
    Variant("dense_decode", "hopper", {"batch": 128}),
    Variant("sparse_decode", "hopper", {"batch": 128}),
    Variant("sparse_prefill", "hopper", {"lengths": True}),
    Variant("dense_prefill", "hopper"),
    # Loop counters and addresses; an accumulator would be 16 and more.
    Variant("dense_prefill_backward", "hopper", spills=8),
    Variant("sparse_attention_backward", "hopper", {"lengths": True}),
    Variant("indexer_loss", "hopper", {"lengths": True}),
]
PORTABLE = [
    Variant("dense_decode", "portable", {"heads": 128}),
    Variant("sparse_prefill", "portable", {"lengths": True}, spills=8),
    Variant("dense_prefill", "portable"),
    # Addresses of the rows that a thread copies, next to dq of 64 heads; an accumulator would be 128 and more.
    Variant("sparse_attention_backward", "portable", {"lengths": True}, spills=120),
    Variant("paged_attention", "portable", {"tokens": 2048}),
    Variant("merge_states", "portable", products=None),
    Variant("cache_write", "portable", {"form": "v32"}, products=None),
    Variant("cache_write", "portable", {"form": "bf16", "of_requests": True}, products=None),
    # ptxas has reordered its conversions of scales to e4m3 and back (``support.stack_pointer``).
    Variant("cache_write", "portable", {"form": "nvfp4_ds_mla", "dtype": torch.float32}, products=None),
    Variant("cache_gather", "portable", {"form": "model1"}, products=None),
    Variant("cache_copy", "portable", {"disjoint": False}, products=None),
    Variant("reshape_and_cache", "portable", {"cache_dtype": FP8, "per_token": True}, products=None),
    Variant("gather_records", "portable", products=None),
    Variant("compress", "portable", products=None),
    Variant("concat_mla_q", "portable", products=None),
    Variant("index_weights", "portable", {"tokens": 64}, products=None),
    Variant("index_workspace", "portable", products=None),
    Variant("mhc_post", "portable", products=None),
    Variant("mhc_pre", "portable", products=None),
    Variant("pack_seq", "portable", products=None),
    Variant("rope_cache_write", "portable", products=None),
    Variant("unpack_seq", "portable", products=None),
    Variant("inverse_rope_quantize", "portable", products=None),
    Variant("latent_rows", "portable", products=None),
    Variant("q_kv_norm", "portable", products=None),
    Variant("rotate_and_cache", "portable", products=None),
    Variant("rotate_heads", "portable", products=None),
    Variant("turboquant_gather", "portable", {"form": "turboquant_k8v4"}, products=None),
]
MORE_HOPPER = [
    # An address of each consumer's.
    # With Triton 3.6 one is in the path of a diverged warp.
    Variant("dense_decode", "hopper", {"batch": 128, "cache_dtype": FP8}, spills=5),
    # A value in the masking branch, which is taken in the last step of a request.
    Variant("dense_decode", "hopper", {"batch": 128, "page_size": 16}, spills=1),
    Variant("dense_decode", "hopper", {"page_size": 48}, spills=1),
    *(Variant("topk", "hopper", {"rows": rows}, products=None) for rows in (1, 64)),
    *(Variant("topk", "hopper", {"rows": rows, "page_size": 64}, products=None) for rows in (1, 64, 100)),
    # Outside of the innermost loops.
    Variant("topk", "hopper", {"rows": 4096}, products=None, spills=16),
    Variant("topk", "hopper", {"rows": 4096, "dtype": BF16, "with_start": True}, products=None, spills=64),
    Variant("topk", "hopper", {"rows": 4096, "with_values": True, "k": 1024}, products=None, spills=64),
    Variant("topk", "hopper", {"rows": 4096, "page_size": 64, "by_id": True}, products=None, spills=16),
    *(
        Variant("dense_decode", "hopper", call)
        for call in (
            {},
            {"head_dim": 512},
            {"dtype": FP16, "batch": 70, "heads": 8192},
            {"batch_invariant": True, "out_pad": 1},
            {"heads": 126},
            {"cache_dtype": FP8},
            {"cache_dtype": FP8, "dtype": FP16, "page_size": 16, "batch_invariant": True},
            {"cache_dtype": FP8, "head_dim": 512, "heads": 126},
        )
    ),
    *(
        Variant("sparse_decode", "hopper", call)
        for call in (
            LENGTHS,
            {},
            {"batch": 74, "s_q": 1},
            {"batch": 128, "heads": 64},
            {"heads": 16},
            {"batch": 2, "s_q": 1, "heads": 16},
            {"form": "model1", **LENGTHS},
            {"form": "model1", "heads": 192, **LENGTHS},
            {"form": "model1", "page_size": 61, "out_pad": 1, **LENGTHS},
            {"form": "model1", "batch": 2, "heads": 64, "topk": 128, "extra_topk": 512},
            {"form": "v41_fp4", **LENGTHS},
            {"form": "v41_fp4", "heads": 192, **LENGTHS},
            {"form": "v41_fp4", "batch": 2, "heads": 64, "topk": 128, "extra_topk": 512},
            {"form": "bf16", "batch": 128},
            {"batch": 128, "split_q": True},
            {"heads": 16, "split_q": True},
            {"form": "bf16", "split_q": True, **LENGTHS},
            {"form": "bf16", "head_dim": 512, **LENGTHS},
        )
    ),
    Variant("sparse_prefill", "hopper"),
    Variant("sparse_prefill", "hopper", {"head_dim": 512}),
    Variant("sparse_prefill", "hopper", {"head_dim": 512, "dtype": FP16, "lengths": True}),
    Variant("sparse_prefill", "hopper", {"sinks": False}),
    Variant("sparse_prefill", "hopper", {"split_q": True, "lengths": True}),
    Variant("dense_prefill", "hopper", {"head_dim": 128}),
    Variant("dense_prefill", "hopper", {"dtype": FP16, "out_pad": 1}),
    *(
        Variant("paged_attention", "hopper", {"tokens": 2048, "requests": 1, **call})
        for call in (
            {},
            {"page_size": 64, "dtype": FP16, "out_pad": 1},
            {"page_size": 48, "heads": 40, "terms": "sink", "index_dtype": torch.int64},
            {"head_dim": 96, "d_v": 80, "hnd": True},
            {"head_dim": 64, "d_v": 64, "heads": 64},
            {"head_dim": 192, "heads": 8, "page_size": 128},
        )
    ),
    Variant("dense_prefill_backward", "hopper", {"head_dim": 128}),
    Variant("dense_prefill_backward", "hopper", {"dtype": FP16, "deterministic": True, "dlse": True}, spills=8),
    Variant("dense_prefill_backward", "hopper", {"head_dim": 128, "deterministic": True}),
    Variant("dense_prefill_backward", "hopper", {"pad": 8}, spills=8),
    Variant("sparse_attention_backward", "hopper", {"head_dim": 512, "dtype": FP16}),
    Variant("sparse_attention_backward", "hopper", {"heads": 64, "deterministic": True, "sinks": False}),
    Variant("sparse_attention_backward", "hopper", {"heads": 16, "head_dim": 512, "index_dtype": torch.int64}),
    Variant("indexer_loss", "hopper", {"heads": 64, "index_heads": 32, "dtype": FP16, "use_relu": False}),
    Variant("indexer_loss", "hopper", {"head_dim": 512, "weights_dtype": BF16, "index_dtype": torch.int64}),
    Variant("indexer_loss", "hopper", {"heads": 16, "deterministic": True, "with_lse": True, "kv_pad": 8}),
    Variant("indexer_loss", "hopper", {"topk": None}),
]
MORE_PORTABLE = [
    Variant("sparse_decode", "portable", {"form": "v32", "lengths": True}, spills=48),
    Variant("indexer_loss", "portable", {"lengths": True}),
    Variant("turboquant_decode", "portable", products="hmma"),
    Variant("indexer_loss", "portable", {"topk": None}),
    Variant("turboquant_decode", "portable", {"form": "turboquant_3bit_nc", "head_dim": 32}, products="hmma"),
    Variant("dense_decode", "portable", {"heads": 16, "cache_dtype": FP8}, products="hmma"),
    *(Variant("dense_decode", "portable", {"heads": heads}, products="hmma") for heads in (16, 32)),
    *(Variant("dense_decode", "portable", {"heads": heads, "cache_dtype": FP8}) for heads in (32, 128)),
    *(
        Variant("sparse_decode", "portable", {"form": form, "extra_topk": extra}, spills=120 if form != "bf16" else 8)
        for form in ("v32", "model1", "bf16")
        for extra in (0, 1024)
    ),
    *(
        Variant("sparse_decode", "portable", {"form": form, "heads": heads}, products="hmma")
        for form in ("v32", "v32_no_rope", "model1", "v41", "v41_fp4", "bf16")
        for heads in (8, 32)
    ),
    Variant("sparse_prefill", "portable", {"head_dim": 512}, spills=8),
    Variant("sparse_prefill", "portable", {"split_q": True, "lengths": True}, spills=8),
    Variant("sparse_decode", "portable", {"form": "bf16", "split_q": True}, spills=8),
    *(Variant("sparse_prefill", "portable", {"heads": heads}, products="hmma") for heads in (8, 16, 32)),
    Variant("dense_prefill", "portable", {"head_dim": 128}),
    *(
        Variant("paged_attention", "portable", {"tokens": 2048} | call)
        for call in (
            {"terms": "softcap, sink", "hnd": True},
            {"head_dim": 192, "page_size": 256},
            {"head_dim": 256, "d_v": 256},
            {"cache_dtype": torch.float8_e5m2, "dtype": FP16, "out_dtype": FP8},
            {"in_pieces": True},
            # A program for each tile; the last two with the next block's scores under a softmax.
            {"tokens": 8192, "columns": 512},
            {"tokens": 8192, "columns": 512, "page_size": 64, "cache_dtype": FP8},
            {"tokens": 8192, "columns": 512, "page_size": 64, "terms": "softcap"},
        )
    ),
    # Loop-invariant addresses: six loads, where recomputing them takes 338 instructions.
    Variant("paged_attention", "portable", {"tokens": 2048, "cache_dtype": torch.int8, "per_token": True}, spills=6),
    Variant("paged_attention", "portable", {"tokens": 4, "requests": 4, "cache_dtype": FP8}, products="hmma"),
    *(Variant("paged_attention", "portable", {"tokens": 16, "in_pieces": pieces}) for pieces in (False, True)),
    *(
        Variant("paged_attention", "portable", {"tokens": 2, **call}, products="hmma")
        for call in (
            {},
            {"terms": "alibi, bias, prefix, sink, softcap", "window": (128, 0)},
            {"head_dim": 72, "d_v": 72},
            {"page_size": 64, "cache_dtype": torch.int8, "per_token": True},
            {"page_size": 64, "cache_dtype": torch.int8, "heads": 128},
            {"page_size": 64, "cache_dtype": torch.float8_e5m2, "head_dim": 64, "d_v": 64},
            {"in_pieces": True},
        )
    ),
    # dK and dV of 128 keys leave few registers.
    Variant("dense_prefill_backward", "portable", spills=24),
    Variant("dense_prefill_backward", "portable", {"head_dim": 128}),
    Variant("sparse_attention_backward", "portable", {"head_dim": 512, "deterministic": True}, spills=120),
    *(
        Variant("sparse_attention_backward", "portable", {"heads": heads, "dlse": True}, arch, "hmma", spills=4)
        for arch in (80, 86, 120)
        for heads in (16, 128)
    ),
    *(
        Variant("indexer_loss", "portable", {"heads": heads, "index_heads": heads // 2, "topk": topk}, arch, "hmma")
        for arch in (80, 86, 120)
        for heads in (16, 128)
        for topk in (256, None)
    ),
    Variant("indexer_loss", "portable", {"head_dim": 512, "with_lse": True}),
    Variant("indexer_loss", "portable", {"weights_dtype": BF16, "index_dtype": torch.int64, "kv_pad": 8}),
    *(Variant("merge_states", "portable", {"parts": parts}, arch, None) for parts in (2, 8) for arch in (80, 90)),
    *(
        Variant(operation, "portable", {"form": form}, arch, None)
        for operation in ("cache_write", "cache_gather")
        for form in ("v32", "v32_no_rope", "model1", "v41", "v41_fp4", "nvfp4_ds_mla", "bf16", "fp8")
        for arch in (80, 90)
    ),
    Variant("cache_write", "portable", {"form": "v32", "scale_rounding": "exact"}, products=None),
    *(
        Variant("cache_write", "portable", {"form": form, "dtype": dtype, "gap": gap}, products=None, spills=4)
        for form in ("v32", "model1", "v41", "v41_fp4", "nvfp4_ds_mla", "fp8")
        for dtype in (torch.float32, FP16)
        for gap in (0, 1)
    ),
    *(
        Variant("reshape_and_cache", "portable", {"cache_dtype": dtype, "in_pieces": pieces}, arch, None)
        for dtype in (BF16, FP8, torch.float8_e5m2, torch.int8)
        for pieces in (False, True)
        for arch in (80, 90)
    ),
    Variant("reshape_and_cache", "portable", {"widths": (192, 512)}, products=None),
    Variant("merge_states", "portable", {"context_tokens": 7, "to_e4m3": True}, products=None),
    *(
        Variant("latent_rows", "portable", {"interleaved": turn, "with_cache": cache}, arch, None)
        for turn in (True, False)
        for cache in (True, False)
        for arch in (80, 90)
    ),
    Variant("rotate_heads", "portable", {"interleaved": False}, products=None),
    *(
        # Some addresses; an accumulator would be 16 and more.
        Variant("turboquant_decode", "portable", {"form": f"turboquant_{form}", **call}, arch, "hmma", spills=8)
        for form, arch, call in (
            ("k8v4", 90, {}),
            ("k3v4_nc", 90, {"dtype": FP16}),
            ("3bit_nc", 90, {"s_q": 3, "causal": True}),
            ("4bit_nc", 90, {"gap": 0, "page_size": 16}),
            ("4bit_nc", 80, {}),
            ("3bit_nc", 80, {"head_dim": 64}),
            ("k8v4", 89, {}),
        )
    ),
    *(
        # Addresses of the rows that a thread loads.
        Variant(
            "turboquant_store", "portable", {"form": f"turboquant_{form}", "dtype": dtype}, 90, "hgmma", spills=spills
        )
        for form, dtype, spills in (("k8v4", BF16, 8), ("3bit_nc", FP16, 24), ("4bit_nc", FP16, 8))
    ),
    Variant("turboquant_store", "portable", spills=8),
    Variant("turboquant_gather", "portable", {"form": "turboquant_3bit_nc", "gap": 0}),
    *(
        # So that three programs fit an SM, which is faster all the same.
        Variant("compress", "portable", {"form": form, "ratio": ratio}, products=None, spills=4 if ratio == 128 else 0)
        for form in ("model1", "bf16", "index_fp8", "index_mxfp4")
        for ratio in (4, 128)
    ),
    *(
        Variant("compress", "portable", {"form": form, "ratio": 2}, products=None)
        for form in ("v41", "v41_fp4", "bf16")
    ),
    Variant("compress", "portable", {"ratio": 128, "dtype": BF16}, 80, None),
    Variant("compress", "portable", {"with_state": False}, products=None),
    Variant("inverse_rope_quantize", "portable", {"packed": True}, products=None),
    Variant("inverse_rope_quantize", "portable", {"dtype": torch.float32}, 80, None),
    Variant("q_kv_norm", "portable", {"dtype": torch.float32}, 80, None),
    *(
        Variant("rotate_and_cache", "portable", {"form": form, "dtype": dtype}, arch, None)
        for form, dtype, arch in (
            ("bf16", BF16, 90),
            ("fp32", torch.float32, 90),
            ("model1", BF16, 80),
            ("v41", BF16, 90),
            ("v41_fp4", BF16, 90),
            ("v41", BF16, 80),
        )
    ),
]


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(one, id=str(one)) for one in (*HOPPER, *PORTABLE)),
        *(pytest.param(one, id=str(one), marks=pytest.mark.full) for one in (*MORE_HOPPER, *MORE_PORTABLE)),
    ],
)
def test_limits(record, variant):
    found = main_kernels(launches(record, variant.operation, variant.backend, arch=variant.arch, **variant.call))
    assert found
    for one in found:
        code = one.compile(variant.arch)
        assert code.shared + one.shared_beside <= SHARED_BYTES[variant.arch], code
        counts = {"hgmma": code.hgmma, "hmma": code.hmma}
        expected = counts.pop(variant.products, 1)
        assert expected > 0, code
        assert not any(counts.values()), code
        # A compiler that is short of registers serializes products: it waits after each of them.
        assert code.waits <= code.hgmma / 4, code
        spills = loop_spills(code.sass) if variant.products else code.spills
        assert spills <= allowed(str(variant), variant.spills), code


@pytest.mark.parametrize(
    "variant",
    [HOPPER[0], HOPPER[2], pytest.param(Variant("sparse_decode", "hopper", LENGTHS), marks=pytest.mark.full)],
    ids=lambda variant: variant.operation,
)
def test_partition_arguments_do_not_overwrite_pending_reductions(record, variant):
    """Arguments of partitions reuse the shared memory of reductions (``barriers.sync_before_warp_specialize``)."""
    (main,) = main_kernels(launches(record, variant.operation, variant.backend, **variant.call))
    code = [line for line in main.compile().sass.splitlines() if re.search(r"\b(?:LDS|STS|BAR\.SYNC)\b", line)]
    begins = next(i for i, line in enumerate(code) if " 0x1 ;" in line and i and "STS" in code[i - 1])
    while "STS" in code[begins - 1]:
        begins -= 1
    assert "BAR.SYNC" in code[begins - 1]
    assert " 0x0" in code[begins - 1]
