# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch

from flashlatte import paged_attention
from flashlatte.testing.paged_attention_case import PagedAttentionCase

CASE = PagedAttentionCase(2, 3, 5, 4, 2, head_dim=24, d_v=16, page_size=7)
VALID = CASE.inputs()
Q, K, V = VALID["q"], VALID["k_cache"], VALID["v_cache"]
TABLE, LENGTHS, BOUNDARIES = VALID["block_table"], VALID["seqused_k"], VALID["cu_seqlens_q"]
PAGES = K.shape[0]
META = torch.device("meta")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FP8 = {"k_cache": torch.zeros(K.shape).to(E4M3), "v_cache": torch.zeros(V.shape).to(E4M3)}
NEW = {"k": torch.zeros(6, 2, 24, dtype=BF16), "v": torch.zeros(6, 2, 16, dtype=BF16)}


def test_the_arguments_that_the_errors_start_from_are_right():
    paged_attention(**VALID)
    paged_attention(**(VALID | FP8))
    paged_attention(**(VALID | NEW))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.double()}, TypeError, "^q must be bfloat16 or float16 or float32, got float64$"),
        ({"q": Q[0]}, ValueError, r"^q must have shape \[T, h_q, d\] .* got \[4, 24\]$"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "^q must have last stride 1"),
        ({"k_cache": None}, TypeError, "^k_cache must be a tensor, got NoneType$"),
        ({"k_cache": K.half()}, TypeError, "^q and k_cache must .*bfloat16 and k_cache in float16$"),
        ({"k_cache": K[0]}, ValueError, r"^k_cache must have shape \[pages, page_size, h_kv, 24\]"),
        ({"k_cache": K[..., :20]}, ValueError, r"^k_cache must have shape \[pages, page_size, h_kv, 24\]"),
        ({"k_cache": K.unflatten(3, (3, 8))[..., :2, :]}, ValueError, r"^k_cache must have shape .*, h_kv, 3, 8\]"),
        ({"k_cache": K[..., None][..., :10, :].expand(-1, -1, -1, -1, 5)}, ValueError, "^k_cache must have shape"),
        ({"k_cache": K.to(META)}, ValueError, "^k_cache must be on cpu like the other arguments, got meta$"),
        ({"k_cache": K.repeat(1, 1, 2, 1)[:, :, :3]}, ValueError, "^k_cache must have .* divides q's 4, got 3$"),
        ({"v_cache": V.half()}, TypeError, "^v_cache must be bfloat16, got float16$"),
        ({"v_cache": V[1:]}, ValueError, rf"^v_cache must have shape \[{PAGES}, 7, 2, d_v\]"),
        ({"v_cache": V[:, :, :1]}, ValueError, rf"^v_cache must have shape \[{PAGES}, 7, 2, d_v\]"),
        ({"block_table": TABLE.float()}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"block_table": TABLE[:1]}, ValueError, r"^block_table must have shape \[2, max_pages\]"),
        ({"block_table": TABLE.T.contiguous().T}, ValueError, "^block_table must have last stride 1"),
        ({"block_table": torch.zeros(1, dtype=torch.int32).expand(2, 2**28)}, ValueError, "^block_table must have"),
        ({"seqused_k": [8, 8]}, TypeError, "^seqused_k must be a tensor, got list$"),
        ({"seqused_k": LENGTHS[:1]}, ValueError, r"^seqused_k must have shape \[2\] .* got \[1\]$"),
        ({"cu_seqlens_q": BOUNDARIES.float()}, TypeError, "^cu_seqlens_q must be int32 or int64, got float32$"),
        ({"cu_seqlens_q": BOUNDARIES[:1]}, ValueError, r"^cu_seqlens_q must have shape \[b \+ 1\] with b at least 1"),
        ({"cu_seqlens_q": BOUNDARIES.flip(0)}, ValueError, r"^cu_seqlens_q must not decrease, got \[6, 3, 0\]$"),
        ({"cu_seqlens_q": BOUNDARIES + 1}, ValueError, "^cu_seqlens_q must be between 0 and 6, the number of tokens"),
        ({"k": NEW["k"]}, ValueError, "^k and v must be given together, got no v$"),
        ({"v": NEW["v"]}, ValueError, "^k and v must be given together, got no k$"),
        (NEW | {"k": NEW["k"][:5]}, ValueError, r"^k must have shape \[6, 2, 24\]"),
        (NEW | {"v": NEW["v"].float()}, TypeError, "^v must be bfloat16, got float32$"),
        (NEW | {"v": NEW["v"].mT.contiguous().mT}, ValueError, "^v must have last stride 1"),
        ({"softmax_scale": 0.0}, ValueError, "^softmax_scale must be a finite number above 0, got 0.0$"),
        ({"causal": 1}, TypeError, "^causal must be True or False, got 1$"),
        ({"window": 0}, ValueError, "^window must be at least 1, or a pair, got 0$"),
        ({"window": (1, -2)}, ValueError, "^window must hold lengths of at least 0, or -1 for unbounded"),
        ({"window": 1.5}, TypeError, "^window must be an int, a pair of ints or None, got 1.5$"),
        ({"prefix_ranges": torch.zeros(2, 1, 2)}, TypeError, "^prefix_ranges must be int32 or int64, got float32$"),
        ({"prefix_ranges": torch.zeros(2, 2).int()}, ValueError, r"^prefix_ranges must have shape \[2, r, 2\]"),
        ({"softcap": -1.0}, ValueError, "^softcap must be a finite number of at least 0, got -1.0$"),
        ({"softcap": math.nan}, ValueError, "^softcap must be a finite number of at least 0, got nan$"),
        ({"softcap": 1e39}, ValueError, r"^softcap must be a number that is a normal float32, got 1e\+39$"),
        ({"softcap": 3e38}, ValueError, r"^softcap must be at most 2\^125, got 3e\+38$"),
        ({"softcap": None}, TypeError, "^softcap must be a number, got NoneType$"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"^alibi_slopes must have shape \[4\]"),
        ({"alibi_slopes": torch.ones(4).half()}, TypeError, "^alibi_slopes must be float32, got float16$"),
        ({"alibi_sqrt": True}, ValueError, "^alibi_sqrt must be False if alibi_slopes is None$"),
        ({"attn_sink": torch.ones(2)}, ValueError, r"^attn_sink must have shape \[4\]"),
        ({"qq_bias": torch.ones(2, 3)}, ValueError, r"^qq_bias must have shape \[n, n\], got \[2, 3\]$"),
        ({"qq_bias": torch.ones(2, 2).double()}, TypeError, "^qq_bias must be float32, got float64$"),
        ({"k_scale": 1.0}, ValueError, "^k_scale belongs to a cache in float8_e4m3fn .* and this one is bfloat16$"),
        (FP8 | {"k_scale": 0.0}, ValueError, "^k_scale must be a finite number above 0, got 0.0$"),
        (FP8 | {"k_scale": 1e-50}, ValueError, "^k_scale must be a number that is a normal float32, got 1e-50$"),
        (
            FP8 | {"v_scale": torch.ones(3)},
            ValueError,
            r"^v_scale must have one element or shape \[2\] or .*, got \[3\]$",
        ),
        (FP8 | {"v_scale": torch.ones(2).half()}, TypeError, "^v_scale must be float32, got float16$"),
        (FP8 | {"k_scale": torch.ones(2, device=META)}, ValueError, "^k_scale must be on cpu"),
        ({"out": torch.empty(6, 4, 24, dtype=BF16)}, ValueError, r"^out must have shape \[6, 4, 16\]"),
        ({"out": torch.empty(6, 4, 16)}, TypeError, "^out must be bfloat16 or float8_e4m3fn, got float32$"),
        ({"out": torch.empty(6, 4, 16, dtype=BF16), "out_scale": 1.0}, TypeError, "^out must be float8_e4m3fn"),
        ({"out": torch.empty(6, 1, 16, dtype=BF16).expand(6, 4, 16)}, ValueError, "^out must not be an expanded"),
        (
            {"q": Q[..., :16], "k_cache": K[..., :16], "out": Q[..., :16]},
            ValueError,
            "^out must share no memory with q",
        ),
        ({"out_scale": torch.ones(2)}, ValueError, r"^out_scale must have one element, got shape \[2\]$"),
        ({"out_scale": -1.0}, ValueError, "^out_scale must be a finite number above 0, got -1.0$"),
        ({"lse": torch.empty(4, 6)}, ValueError, r"^lse must have shape \[6, 4\]"),
        ({"lse": torch.empty(6, 4, dtype=BF16)}, TypeError, "^lse must be float32, got bfloat16$"),
        ({"empty_lse": 0.0}, ValueError, r"^empty_lse must be float\('inf'\) or float\('-inf'\), got 0.0$"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of .* or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of paged_attention: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        paged_attention(**(VALID | change))
