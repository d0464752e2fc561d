# Keyword arguments are built in dicts of mixed values.
# pyright: reportArgumentType=false

import math

import pytest
import torch

from flashlatte import sparse_attention
from flashlatte.testing.cases import SparsePrefillCase

VALID = SparsePrefillCase(3, 30, 4, 9, head_dim=24, d_v=16, topk_lengths=True).inputs()
Q, KV, INDICES, LENGTH, SINK = (VALID[name] for name in ("q", "kv", "indices", "topk_length", "attn_sink"))
META = torch.device("meta")


def test_the_arguments_that_the_errors_start_from_are_right():
    sparse_attention(**VALID)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "^q must be a tensor, got list$"),
        ({"q": Q.to(torch.float8_e4m3fn)}, TypeError, "^q must be bfloat16 or float16 or float32 or float64, got"),
        ({"q": Q[0]}, ValueError, r"^q must have shape \[s_q, h_q, d\] .* got \[4, 24\]$"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "^q must have last stride 1"),
        ({"kv": KV.half()}, TypeError, "^q and kv must agree in dtype, got q in bfloat16 and kv in float16$"),
        ({"kv": KV[:, 0]}, ValueError, r"^kv must have shape \[s_kv, 1, 24\] .* got \[30, 24\]$"),
        ({"kv": KV[:0]}, ValueError, r"^kv must have shape .* no empty axis, got \[0, 1, 24\]$"),
        ({"kv": KV.to(META)}, ValueError, "^kv must be on cpu like the other arguments, got meta$"),
        ({"indices": INDICES.float()}, TypeError, "^indices must be int32 or int64, got float32$"),
        ({"indices": INDICES[:, 0]}, ValueError, r"^indices must have shape \[3, 1, topk\] .* got \[3, 9\]$"),
        ({"indices": INDICES[..., :0]}, ValueError, r"^indices must have shape .* no empty axis, got \[3, 1, 0\]$"),
        ({"topk_length": LENGTH[:2]}, ValueError, r"^topk_length must have shape \[3\] .* got \[2\]$"),
        ({"attn_sink": SINK.bfloat16()}, TypeError, "^attn_sink must be float32, got bfloat16$"),
        ({"attn_sink": SINK[:3]}, ValueError, r"^attn_sink must have shape \[4\] .* got \[3\]$"),
        ({"softmax_scale": -math.inf}, ValueError, "^softmax_scale must be a finite number above 0, got -inf$"),
        ({"d_v": 25}, ValueError, "^d_v must be at most q's last dimension 24, got 25$"),
        ({"deterministic": "yes"}, TypeError, "^deterministic must be True or False, got 'yes'$"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of hopper, portable, reference or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve this call of sparse_prefill: it "),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        sparse_attention(**(VALID | change))


def test_sinks_of_float64_queries_are_float64():
    wide = VALID | {"q": Q.double(), "kv": KV.double()}
    with pytest.raises(TypeError, match="attn_sink must be float64, got float32"):
        sparse_attention(**wide)
    sparse_attention(**wide | {"attn_sink": SINK.double()})


def test_no_forward_mode_derivative():
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        sparse_attention(**VALID | {"q": torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))})
