# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch

from flashlatte import kv_cache, sparse_decode
from flashlatte.testing.cases import SparseDecodeCase

VALID = SparseDecodeCase(
    2, 3, 30, 4, 9, extra_topk=5, extra_s_k=9, topk_lengths="request", extra_topk_lengths="token"
).inputs()
Q, CACHE, INDICES, LENGTH, SINK = (VALID[name] for name in ("q", "k_cache", "indices", "topk_length", "attn_sink"))
EXTRA, EXTRA_INDICES = VALID["extra_k_cache"], VALID["extra_indices"]
NO_EXTRA = {"extra_k_cache": None, "extra_indices": None, "extra_topk_length": None}
META = torch.device("meta")
BF16 = torch.bfloat16
BF16_CACHE = torch.zeros(2, 3, 1, 576, dtype=BF16)


def test_the_arguments_that_the_errors_start_from_are_right():
    sparse_decode(**VALID)
    sparse_decode(**(VALID | NO_EXTRA | {"k_cache": BF16_CACHE, "cache_format": None}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.double()}, TypeError, "^q must be bfloat16 or float16 or float32, got float64$"),
        ({"q": Q[0]}, ValueError, r"^q must have shape \[b, s_q, h_q, d\] .* got \[3, 4, 576\]$"),
        ({"q": Q[:, :, :0]}, ValueError, r"^q must have shape .* no empty axis .*, got \[2, 3, 0, 576\]$"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "^q must have last stride 1"),
        ({"q": Q[..., :512]}, ValueError, "^k_cache of format v32 must have rows of q's 512 elements, got 576$"),
        ({"k_cache": None}, TypeError, "^k_cache must be a tensor, got NoneType$"),
        ({"k_cache": CACHE[0, 0]}, ValueError, r"^k_cache must have shape \[pages, page_size, 1, 656\]"),
        ({"k_cache": CACHE[:0]}, ValueError, r"^k_cache must have shape .* no empty axis"),
        ({"k_cache": CACHE.repeat(1, 1, 2, 1)}, ValueError, r"^k_cache must have shape \[pages, page_size, 1, 656\]"),
        (
            {"k_cache": CACHE.int()},
            TypeError,
            "^k_cache of format v32 must be uint8 or int8 or float8_e4m3fn, got int32$",
        ),
        ({"k_cache": CACHE[..., :584]}, ValueError, "^k_cache of format v32 must be 656 wide, got 584$"),
        ({"k_cache": CACHE[..., :600], "cache_format": None}, ValueError, "^k_cache must be a .* got uint8 600 wide$"),
        ({"k_cache": CACHE[:, ::2]}, ValueError, "^k_cache of format v32 must have a token stride of 656"),
        (
            {"k_cache": CACHE[:1].expand_as(CACHE)},
            ValueError,
            "^k_cache of format v32 must have a page stride of at least ",
        ),
        ({"k_cache": CACHE.to(META)}, ValueError, "^k_cache must be on cpu like the other arguments, got meta$"),
        ({"cache_format": "v33"}, ValueError, "^cache_format must be one of bf16, .* got 'v33'$"),
        ({"cache_format": "model1"}, ValueError, "^k_cache of format model1 must be 584 wide, got 656$"),
        ({"cache_format": "bf16"}, TypeError, "^k_cache of format bf16 must be bfloat16, got uint8$"),
        (
            {"cache_format": "fp8"},
            ValueError,
            "^k_cache must be in bf16, fp16, fp32, v32, v32_no_rope, model1, v41, v41_fp4 or nvfp4_ds_mla for .*fp8$",
        ),
        (
            {"k_cache": BF16_CACHE.half(), "cache_format": None, **NO_EXTRA},
            TypeError,
            "^q and k_cache must agree in dtype, got q in bfloat16 and k_cache in float16$",
        ),
        ({"indices": [[[0]]]}, TypeError, "^indices must be a tensor, got list$"),
        ({"indices": INDICES.float()}, TypeError, "^indices must be int32 or int64, got float32$"),
        ({"indices": INDICES[:, 0]}, ValueError, r"^indices must have shape \[2, 3, topk\] .* got \[2, 9\]$"),
        ({"indices": INDICES[:, :2]}, ValueError, r"^indices must have shape \[2, 3, topk\] .* got \[2, 2, 9\]$"),
        ({"indices": INDICES[..., :0]}, ValueError, r"^indices must have shape .* no empty axis, got \[2, 3, 0\]$"),
        ({"indices": INDICES.to(META)}, ValueError, "^indices must be on cpu"),
        ({"indices": INDICES.mT.contiguous().mT}, ValueError, "^indices must have last stride 1"),
        ({"topk_length": [9, 9]}, TypeError, "^topk_length must be a tensor, got list$"),
        ({"topk_length": LENGTH.float()}, TypeError, "^topk_length must be int32 or int64, got float32$"),
        ({"topk_length": LENGTH[:1]}, ValueError, r"^topk_length must have shape \[2\] .* got \[1\]$"),
        ({"topk_length": LENGTH[:, None]}, ValueError, r"^topk_length must have shape \[2, 3\] .* got \[2, 1\]$"),
        ({"topk_length": LENGTH[0]}, ValueError, r"^topk_length must have shape \[2\] or \[2, 3\], got \[\]$"),
        ({"topk_length": LENGTH.to(META)}, ValueError, "^topk_length must be on cpu"),
        ({"attn_sink": 0.5}, TypeError, "^attn_sink must be a tensor, got float$"),
        ({"attn_sink": SINK.double()}, TypeError, "^attn_sink must be float32, got float64$"),
        ({"attn_sink": SINK[:3]}, ValueError, r"^attn_sink must have shape \[4\] .* got \[3\]$"),
        ({"attn_sink": SINK.to(META)}, ValueError, "^attn_sink must be on cpu"),
        (
            {"extra_k_cache": None, "extra_topk_length": None},
            ValueError,
            "^extra_indices must be None if extra_k_cache is None",
        ),
        (
            {"extra_k_cache": None, "extra_indices": None},
            ValueError,
            "^extra_topk_length must be None if extra_k_cache is None",
        ),
        ({"extra_indices": None}, ValueError, "^extra_indices must be given if extra_k_cache is, got None$"),
        ({"extra_k_cache": [0]}, TypeError, "^extra_k_cache must be a tensor, got list$"),
        ({"extra_k_cache": EXTRA[..., :584]}, ValueError, "^extra_k_cache of format v32 must be 656 wide, got 584$"),
        ({"extra_k_cache": BF16_CACHE}, TypeError, "^extra_k_cache of format v32 must be uint8 .* got bfloat16$"),
        ({"extra_k_cache": EXTRA.to(META)}, ValueError, "^extra_k_cache must be on cpu"),
        ({"extra_indices": EXTRA_INDICES[:1]}, ValueError, r"^extra_indices must have shape \[2, 3, topk\]"),
        ({"extra_indices": EXTRA_INDICES.short()}, TypeError, "^extra_indices must be int32 or int64, got int16$"),
        ({"extra_topk_length": LENGTH[:1]}, ValueError, r"^extra_topk_length must have shape \[2\] .* got \[1\]$"),
        ({"head_dim_v": 577}, ValueError, "^head_dim_v must be at most q's last dimension 576, got 577$"),
        ({"head_dim_v": 0}, ValueError, "^head_dim_v must be at least 1, got 0$"),
        ({"head_dim_v": None}, TypeError, "^head_dim_v must be an int, got NoneType$"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"softmax_scale": math.inf}, ValueError, "^softmax_scale must be a finite number above 0, got inf$"),
        ({"batch_invariant": None}, TypeError, "^batch_invariant must be True or False, got None$"),
        ({"empty_lse": 1.0}, ValueError, r"^empty_lse must be float\('inf'\) or float\('-inf'\), got 1.0$"),
        ({"out": torch.empty(2, 3, 4, 512)}, TypeError, "^out must be bfloat16, got float32$"),
        ({"out": torch.empty(2, 3, 4, 500, dtype=BF16)}, ValueError, r"^out must have shape \[2, 3, 4, 512\]"),
        ({"out": torch.empty(2, 3, 4, 512, dtype=BF16, device=META)}, ValueError, "^out must be on cpu"),
        ({"out": torch.empty(2, 3, 512, 4, dtype=BF16).mT}, ValueError, "^out must have last stride 1"),
        ({"lse": torch.empty(2, 4, 3, dtype=BF16)}, TypeError, "^lse must be float32, got bfloat16$"),
        ({"lse": torch.empty(2, 3, 4)}, ValueError, r"^lse must have shape \[2, 4, 3\] .* got \[2, 3, 4\]$"),
        ({"lse": torch.empty(2, 4, 3, device=META)}, ValueError, "^lse must be on cpu"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of sparse_decode: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        sparse_decode(**(VALID | {"cache_format": "v32"} | change))


def test_a_model1_cache_needs_512_wide_queries():
    cache = kv_cache.allocate("model1", 2, 3)
    with pytest.raises(ValueError, match=r"^k_cache of format model1 must have rows of q's 576 elements, got 512$"):
        sparse_decode(Q, cache, INDICES)
