import math

import pytest
import torch

from flashlatte import dense_decode, kv_cache
from flashlatte.testing.cases import DenseDecodeCase

VALID = DenseDecodeCase(2, 3, 20, 4, h_kv=2, head_dim=24, head_dim_v=16, page_size=7).inputs()
Q, CACHE, TABLE, LENGTHS = VALID["q"], VALID["k_cache"], VALID["block_table"], VALID["cache_seqlens"]
ROPE = Q[..., 16:]
META = torch.device("meta")
BF16 = torch.bfloat16


def test_the_arguments_that_the_errors_start_from_are_right():
    dense_decode(**VALID)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.double()}, TypeError, "^q must be bfloat16 or float16 or float32, got float64$"),
        ({"q": Q[0]}, ValueError, r"^q must have shape \[b, s_q, h_q, d\] .* got \[3, 4, 24\]$"),
        ({"q": Q[:, :, :0]}, ValueError, r"^q must have shape .* no empty axis .*, got \[2, 3, 0, 24\]$"),
        ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "^q must have last stride 1"),
        ({"q_rope": 1.0}, TypeError, "^q_rope must be a tensor, got float$"),
        ({"q_rope": ROPE.float()}, TypeError, "^q_rope must be bfloat16, got float32$"),
        ({"q_rope": ROPE[:1]}, ValueError, r"^q_rope must have shape \[2, 3, 4, rope\] .* got \[1, 3, 4, 8\]$"),
        ({"q_rope": ROPE.to(META)}, ValueError, "^q_rope must be on cpu"),
        ({"q_rope": ROPE}, ValueError, r"^k_cache must have shape \[pages, page_size, h_kv, 32\] .* 24\]$"),
        ({"k_cache": None}, TypeError, "^k_cache must be a tensor, got NoneType$"),
        (
            {"k_cache": CACHE.float()},
            TypeError,
            "^q and k_cache must agree in dtype, or k_cache float8_e4m3fn, got q in bfloat16 and k_cache in float32$",
        ),
        ({"k_cache": CACHE[0]}, ValueError, r"^k_cache must have shape \[pages, page_size, h_kv, 24\]"),
        ({"k_cache": CACHE[..., :23]}, ValueError, r"^k_cache must have shape \[pages, page_size, h_kv, 24\]"),
        ({"k_cache": CACHE[:0]}, ValueError, "^k_cache must have shape .* no empty axis"),
        ({"k_cache": CACHE.to(META)}, ValueError, "^k_cache must be on cpu like the other arguments, got meta$"),
        ({"k_cache": CACHE.mT.contiguous().mT}, ValueError, "^k_cache must have last stride 1"),
        ({"k_cache": CACHE.repeat(1, 1, 2, 1)[:, :, :3]}, ValueError, "^k_cache must have .* divides q's 4, got 3$"),
        ({"block_table": [[0]]}, TypeError, "^block_table must be a tensor, got list$"),
        ({"block_table": TABLE.float()}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"block_table": TABLE[0]}, ValueError, r"^block_table must have shape \[2, max_pages\]"),
        ({"block_table": TABLE[:1]}, ValueError, r"^block_table must have shape \[2, max_pages\]"),
        ({"block_table": TABLE[:, :0]}, ValueError, r"^block_table must have shape .* got \[2, 0\]$"),
        ({"block_table": TABLE.to(META)}, ValueError, "^block_table must be on cpu"),
        ({"block_table": TABLE.T.contiguous().T}, ValueError, "^block_table must have last stride 1"),
        ({"cache_seqlens": [20, 20]}, TypeError, "^cache_seqlens must be a tensor, got list$"),
        ({"cache_seqlens": LENGTHS.short()}, TypeError, "^cache_seqlens must be int32 or int64, got int16$"),
        ({"cache_seqlens": LENGTHS[:1]}, ValueError, r"^cache_seqlens must have shape \[2\] .* got \[1\]$"),
        ({"cache_seqlens": LENGTHS.to(META)}, ValueError, "^cache_seqlens must be on cpu"),
        ({"head_dim_v": 25}, ValueError, "^head_dim_v must be at most q's last dimension 24, got 25$"),
        ({"head_dim_v": 0}, ValueError, "^head_dim_v must be at least 1, got 0$"),
        ({"head_dim_v": 16.0}, TypeError, "^head_dim_v must be an int, got float$"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"softmax_scale": -1.0}, ValueError, "^softmax_scale must be a finite number above 0, got -1.0$"),
        ({"softmax_scale": math.nan}, ValueError, "^softmax_scale must be a finite number above 0, got nan$"),
        ({"softmax_scale": "1"}, TypeError, "^softmax_scale must be a number, got str$"),
        ({"causal": 1}, TypeError, "^causal must be True or False, got 1$"),
        ({"batch_invariant": None}, TypeError, "^batch_invariant must be True or False, got None$"),
        ({"k_scale": 1.0}, ValueError, "^k_scale must be None unless k_cache is float8_e4m3fn"),
        ({"empty_lse": 0.0}, ValueError, r"^empty_lse must be float\('inf'\) or float\('-inf'\), got 0.0$"),
        ({"empty_lse": None}, TypeError, "^empty_lse must be a number, got NoneType$"),
        ({"out": [0.0]}, TypeError, "^out must be a tensor, got list$"),
        ({"out": torch.empty(2, 3, 4, 16)}, TypeError, "^out must be bfloat16, got float32$"),
        ({"out": torch.empty(2, 3, 4, 24, dtype=BF16)}, ValueError, r"^out must have shape \[2, 3, 4, 16\]"),
        ({"out": torch.empty(2, 3, 4, 16, dtype=BF16, device=META)}, ValueError, "^out must be on cpu"),
        ({"out": torch.empty(2, 3, 16, 4, dtype=BF16).mT}, ValueError, "^out must have last stride 1"),
        ({"lse": torch.empty(2, 4, 3, dtype=BF16)}, TypeError, "^lse must be float32, got bfloat16$"),
        ({"lse": torch.empty(2, 3, 4)}, ValueError, r"^lse must have shape \[2, 4, 3\] .* got \[2, 3, 4\]$"),
        ({"lse": torch.empty(2, 4, 3, device=META)}, ValueError, "^lse must be on cpu"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of dense_decode: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        dense_decode(**(VALID | change))


@pytest.mark.parametrize(
    ("k_scale", "error", "message"),
    [
        (0.0, ValueError, "^k_scale must be a finite number above 0, got 0.0$"),
        (-1, ValueError, "^k_scale must be a finite number above 0, got -1$"),
        ("1", TypeError, "^k_scale must be a number, got str$"),
        (torch.ones(1, dtype=BF16), TypeError, "^k_scale must be a float or a float32 tensor, got bfloat16$"),
        (torch.ones(1).to_sparse(), TypeError, "^k_scale must be a strided tensor, got layout torch.sparse_coo$"),
        (torch.ones(2), ValueError, r"^k_scale must have one element, got shape \[2\]$"),
        (torch.ones(1, device=META), ValueError, "^k_scale must be on cpu like the .*, got meta$"),
    ],
)
def test_k_scale_errors(k_scale, error, message):
    with pytest.raises(error, match=message):
        dense_decode(**(VALID | {"k_cache": CACHE.to(torch.float8_e4m3fn), "k_scale": k_scale}))


@pytest.mark.parametrize("cache_format", ["v32", "model1"])
def test_a_cache_with_scales_is_pointed_to_sparse_decode(cache_format):
    cache = kv_cache.allocate(cache_format, 5, 7)
    q = torch.zeros(*Q.shape[:3], kv_cache.get_format(cache_format).head_dim)
    with pytest.raises(ValueError, match=f"^k_cache .* a cache of format {cache_format}, which sparse_decode reads$"):
        dense_decode(q, cache, VALID["block_table"], VALID["cache_seqlens"])
